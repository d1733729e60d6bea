"""The HTTP endpoint of a run, in the run's event loop. A client's request samples from the policy in the session of an episode.

    policy.base_url ──▶ Endpoint.open ──▶ (URL, key)
    client ──▶ http/server.py ──▶ keys.py: session ──▶ parameters.py: request ──▶ session.chat ──▶ replies.py: JSON or events

The engine returns whole answers, so a streamed answer is sent in one piece after its last token. Until then comments in the stream
keep the connection alive.

Guarantees
* a key gives access to at most one episode. The end of the episode cancels its requests; later requests get status 401;
* if a client disconnects, its request is cancelled. A choice that is not sampled yet adds no tokens to the trajectory;
* a sampled answer that was not delivered is kept for a retry. The next request with the same key, path and body gets this answer,
  and the trajectory has it once. The episode's end removes an undelivered answer from the trajectory, if no request continued it;
* after the delivery an equal request samples a new answer, unless its header `x-stainless-retry-count` says that it is a retry;
* a parameter that would have no effect is documented as ignored, or is refused with an error that names the parameter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import orjson
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.environments.session import Session
from asyncrl.errors import ConfigError, DataError, EngineClosed, EpisodeLimit, GenerationError
from asyncrl.http.access import Address, Refused
from asyncrl.http.server import Handler, HttpServer, receive, web
from asyncrl.types import ChatAnswer, Int32Array, SamplingParams

from .keys import ENDED, Answers, EpisodeKeys, OpenKey
from .messages import MessagesBody, messages_events, messages_reply
from .parameters import ChatBody, CompletionsBody, GenerateBody, SampleRequest, describe, with_integers
from .replies import chat_events, chat_reply, dumps, event, generate_reply, identifier, text_events, text_reply
from .responses import ResponsesBody, responses_events, responses_reply

# Limit for one body. A conversation of a million tokens has about 5 MB.
MOST_BODY_BYTES = 1 << 24
# Limit for the total size of the bodies that are being received.
MOST_HELD_BYTES = 1 << 28
MOST_CONNECTIONS = 4096
# Limit for the open requests of one key.
MOST_REQUESTS = 256
KEEP_ALIVE_S = 10.0  # between two comments in a stream
# Time limit for a client to take a piece of an answer.
SEND_S = 30.0
# How many delivered answers of one key are kept for a late retry. A key of no episode keeps as many undelivered answers.
_MOST_KEPT_ANSWERS = 32
_ANTHROPIC_PATH, _TOO_LONG = "/messages", "context_length_exceeded"
# Status -> type of the error, in the protocols of OpenAI and Anthropic. Any other status has the type of 400.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
_REASONS = {
    "200": "the answer",
    "400": "a parameter is wrong, or not supported",
    "401": "no key, a wrong key, or an ended episode",
}
_REASONS |= {"408": "the body was too slow", "413": "the body is too large", "415": "not JSON"}
_REASONS |= {"429": "too many open requests", "500": "the server failed", "503": "the run ends"}
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
log = logging.getLogger("asyncrl.http")

Count = Callable[[str, int], object]  # (name of a count, number to add)


@dataclass(frozen=True, slots=True)
class Route:
    """A route that samples tokens. `reply`: makes the JSON answer. `events`: makes the streamed answer; None: no streams."""

    body: type[BaseModel]
    reply: Callable[[SampleRequest, Sequence[ChatAnswer], str], dict[str, Any]]
    events: Callable[[SampleRequest, Sequence[ChatAnswer], str], Iterable[bytes]] | None = None


ROUTES: Mapping[str, Route] = {
    "/chat/completions": Route(ChatBody, chat_reply, chat_events),
    "/completions": Route(CompletionsBody, text_reply, text_events),
    "/responses": Route(ResponsesBody, responses_reply, responses_events),
    _ANTHROPIC_PATH: Route(MessagesBody, messages_reply, messages_events),
    "/inference/v1/generate": Route(GenerateBody, generate_reply),
}


class Endpoint:
    """The HTTP endpoint. The runtime runs `serve`, and calls `open` and `end` for episodes."""

    def __init__(
        self,
        address: Address,
        model: str,
        *,
        untrained_session: Callable[[], Session],
        max_context: int,
        count: Count = lambda name, number: None,
    ) -> None:
        """`untrained_session`: makes a session for a request of no episode. `max_context`: limit of tokens, prompt plus reply."""
        self._keys = EpisodeKeys(address)
        self._model, self._max_context, self._count, self._held_bytes = model, max_context, count, 0
        self._untrained_session = untrained_session
        routes: dict[tuple[str, str], Handler] = {
            ("POST", path): partial(self._answer, path, route) for path, route in ROUTES.items()
        }
        routes |= {("GET", "/models"): self._models, ("GET", "/openapi.json"): self._document}
        self._server = HttpServer(self._keys, routes, refusal=self._refuse, connections=MOST_CONNECTIONS)

    async def serve(self) -> None:
        """Answer requests until cancelled. The kernel queues connections that clients make after `open` and before this call."""
        try:
            async with self._server:
                await anyio.sleep_forever()
        finally:
            self._server.stop_listening()

    def open(self, session: Session | None, branch: str = "") -> tuple[str, str]:
        """Returns (base URL, a new key) for the requests of one branch of an episode. `session` None: the requests belong to no
        episode, and are not trained. The first call opens the port. Errors: ConfigError."""
        if not self._server.url:
            self._server.listen()
        return self._server.url, self._keys.issue(session, branch)

    def end(self, session: Session) -> None:
        """Refuse the keys of a session from now on, and cancel their requests."""
        self._keys.end(session)

    async def _answer(self, path: str, route: Route, request: web.BaseRequest) -> web.StreamResponse:
        self._count("endpoint/requests", 1)
        opened, _ = self._keys.find(request)
        if len(opened.requests) >= MOST_REQUESTS:
            raise Refused(429, f"{MOST_REQUESTS} requests with this key are open; wait for an answer")
        stream, refused = web.StreamResponse(headers=_STREAM), Refused(401, ENDED)
        with anyio.CancelScope() as scope:  # `end` cancels the scope
            opened.requests.add(scope)
            try:
                body, session = await self._receive(request), opened.session or self._untrained_session()
                ask = self._read(route.body, body, session)
                digest = hashlib.blake2b(path.encode() + body, digest_size=16).digest()
                return await self._deliver(route, ask, request, opened, session, digest, stream)
            except Refused as error:
                refused = error
            except anyio.get_cancelled_exc_class():
                self._count("endpoint/cancelled", 1)
                raise
            finally:
                opened.requests.discard(scope)
        # A stream that has begun gets the refusal as its last event, if `_send` has not aborted the connection.
        if not stream.prepared or request.transport is None or request.transport.is_closing():
            raise refused
        self._count("endpoint/refused", 1)
        await _send(request, stream, event(_error(refused, request), "error"))
        return stream

    async def _receive(self, request: web.BaseRequest) -> bytearray:
        held = 0

        def count(size: int) -> None:
            nonlocal held
            held += size
            self._held_bytes += size
            if self._held_bytes > MOST_HELD_BYTES:
                raise Refused(429, "too many large requests are being received; try again later")

        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(415, "the body has a Content-Encoding; send it uncompressed")
        try:
            return await receive(request, MOST_BODY_BYTES, count)
        finally:
            self._held_bytes -= held

    def _read(self, kind: type[BaseModel], body: bytearray, session: Session) -> SampleRequest:
        try:
            fields = orjson.loads(body)
            try:
                parsed: Any = kind.model_validate(fields)
            except ValidationError:
                # A client may write an integer as 5.0, because JSON has only one kind of number.
                parsed = kind.model_validate(with_integers(fields))
            ask: SampleRequest = parsed.ask(session.sampling)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from None
        except ValidationError as error:
            message, parameter = describe(error, kind)
            raise Refused(400, message, state=parameter) from None
        return ask

    async def _deliver(
        self,
        route: Route,
        ask: SampleRequest,
        request: web.BaseRequest,
        opened: OpenKey,
        session: Session,
        digest: bytes,
        stream: web.StreamResponse,
    ) -> web.StreamResponse:
        """Send the answer. Reuse choices of an undelivered answer to an equal request. If sending fails, keep the choices."""
        undelivered = opened.undelivered.pop(digest, [])
        answers: Answers = undelivered.pop() if undelivered else {}
        if undelivered:
            opened.undelivered[digest] = undelivered
        delivered = opened.delivered.pop(digest, None)
        if not answers and delivered is not None and request.headers.get("x-stainless-retry-count", "0") != "0":
            # The header says that the client did not get the answer, although its delivery raised no error.
            answers = delivered
        if answers:
            self._count("endpoint/retries", 1)
        opened.answering[id(answers)] = answers, None
        try:
            if ask.stream and route.events is not None:
                async with plain_task_group() as tasks:
                    tasks.start_soon(self._keep_alive, request, stream)
                    choices = await self._choices(ask, session, opened, answers)
                    tasks.cancel_scope.cancel()
                response, data = stream, b"".join(route.events(ask, choices, self._model))
            else:
                choices = await self._choices(ask, session, opened, answers)
                response, data = _json(route.reply(ask, choices, self._model)), b""
            opened.answering[id(answers)] = answers, request.transport
            await _send(request, response, data)
        except BaseException:
            if answers:
                opened.undelivered.setdefault(digest, []).append(answers)
                # A key of no episode lasts as long as the run, so its answers need a limit. Other keys end with their episodes.
                if opened.session is None and len(opened.undelivered) > _MOST_KEPT_ANSWERS:
                    del opened.undelivered[next(iter(opened.undelivered))]
            raise
        finally:
            del opened.answering[id(answers)]
        opened.delivered[digest] = answers
        if len(opened.delivered) > _MOST_KEPT_ANSWERS:
            opened.delivered.popitem(last=False)
        return response

    async def _keep_alive(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        while True:
            await anyio.sleep(KEEP_ALIVE_S)
            await response.prepare(request)
            with anyio.move_on_after(SEND_S):
                await response.write(b": the answer is being sampled\n\n")

    async def _choices(
        self, ask: SampleRequest, session: Session, opened: OpenKey, answers: Answers
    ) -> list[ChatAnswer]:
        """All choices in order. Samples the choices that `answers` lacks, and adds them to `answers`. Errors: Refused."""
        branch = opened.branch
        try:
            prompts = [
                session.chat_format.encode(each) if isinstance(each, str) else np.array(each, np.int32)
                for each in ask.prompts
            ]

            async def sample(number: int) -> None:
                if ask.messages is not None:
                    answers[number] = await session.chat(ask.messages, ask.tools, ask.sampling, branch=branch)
                else:
                    prompt = prompts[number // ask.n]
                    generation = await session.sample(prompt, ask.sampling, branch=branch)
                    answers[number] = ChatAnswer({"content": session.chat_format.text(generation)}, generation, prompt)

            missing = [number for number in range(ask.n * (len(prompts) or 1)) if number not in answers]
            async with plain_task_group() as tasks:
                for number in missing:
                    tasks.start_soon(sample, number)
            ask.top_tokens = await self._top_tokens(ask, answers[0].prompt_ids) if ask.top_logprobs else ()
        except EngineClosed as error:
            raise Refused(503, f"the run ends: {error}") from None
        except EpisodeLimit as error:
            raise Refused(400, str(error), state=_TOO_LONG) from None
        except (ConfigError, DataError, GenerationError, RecursionError) as error:
            raise Refused(400, str(error)) from None
        except Exception as error:
            log.exception("a request of an agent failed")
            raise Refused(500, f"{type(error).__name__}: {error}") from None
        return [answers[number] for number in sorted(answers)]

    async def _top_tokens(self, ask: SampleRequest, prompt_ids: Int32Array) -> Sequence[tuple[int, float]]:
        """The most probable next tokens after the prompt, with their log-probs. Each comes from a greedy request that bans the more
        probable tokens, in a session that is not trained."""
        found: dict[int, float] = {}
        sampling = SamplingParams(temperature=ask.sampling.temperature or 1.0, top_k=1, max_tokens=1)
        for _ in range(ask.top_logprobs):
            banned = dict.fromkeys(found, -100.0)
            # A session for each token, because `rollout.max_turns` limits the requests of a session.
            generation = await self._untrained_session().sample(prompt_ids, replace(sampling, logit_bias=banned))
            token = int(generation.token_ids[0])
            if token in found:
                break
            found[token] = float(generation.logprobs[0])
        return list(found.items())

    async def _models(self, _: web.BaseRequest) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return _json({"object": "list", "data": [model | {"max_model_len": self._max_context}]})

    async def _document(self, _: web.BaseRequest) -> web.Response:
        return _json(_openapi())

    def _refuse(self, error: Refused, request: web.BaseRequest) -> web.Response:
        self._count("endpoint/refused", 1)
        return _json(_error(error, request), error.status)


async def _send(request: web.BaseRequest, response: web.StreamResponse, data: bytes = b"") -> None:
    """Send an answer, or the end of a stream. Errors: ConnectionError if the client has gone, or does not read."""
    try:
        with anyio.fail_after(SEND_S):
            await response.prepare(request)
            await response.write_eof(data)
    except (TimeoutError, anyio.get_cancelled_exc_class()) as error:
        # The client must not get the rest of this answer later: a retry gets the answer, or the end of the episode removes it.
        if request.transport is not None:
            request.transport.abort()
        if not isinstance(error, TimeoutError):
            raise
        raise ConnectionResetError(f"the client did not read its answer for {SEND_S:g} s") from None
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has disconnected")


def _error(error: Refused, request: web.BaseRequest) -> dict[str, Any]:
    """The error in the form of the path's protocol. `error.state`: a refused parameter, `_TOO_LONG`, or by default `refused`."""
    fields: dict[str, Any] = {"type": _TYPES.get(error.status, _TYPES[400]), "message": str(error)}
    if request.path.endswith(_ANTHROPIC_PATH):
        return {"type": "error", "error": fields, "request_id": identifier("req")}
    detail = None if error.state == "refused" else error.state
    code = detail if detail == _TOO_LONG else None
    return {"error": fields | {"param": None if code else detail, "code": code}}


def _openapi() -> dict[str, Any]:
    """The OpenAPI document of the routes, made from the pydantic models that validate requests."""
    bodies = {path: route.body for path, route in ROUTES.items()}
    schemas, definitions = models_json_schema(
        [(body, "validation") for body in bodies.values()], ref_template="#/components/schemas/{model}"
    )
    content = {"application/json": {"schema": {"type": "object"}}}
    answers: dict[str, Any] = {status: {"description": why, "content": content} for status, why in _REASONS.items()}
    stream: dict[str, Any] = {"text/event-stream": {}}
    paths: dict[str, Any] = {
        "/v1/models": {"get": {"responses": {status: answers[status] for status in ("200", "401")}}}
    }
    for path, body in bodies.items():
        full = path if path.startswith("/inference") else f"/v1{path}"
        sent = {"required": True, "content": {"application/json": {"schema": schemas[body, "validation"]}}}
        ok = answers["200"] | {"content": content | (stream if ROUTES[path].events else {})}
        paths[full] = {"post": {"requestBody": sent, "responses": answers | {"200": ok}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncrl", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=dumps(value), content_type="application/json")
