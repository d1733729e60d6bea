"""A session records one episode: every request of the agent goes through the session, which keeps the tokens as a tree.

    chat(messages, tools) ── chat.py: ids ──▶ sample(prompt_ids) ──▶ engine ──▶ tree ──▶ trajectory(reward)

A request changes the tree only when its reply is complete, so a request that was cancelled or failed leaves no tokens.
The random numbers of a request depend on the run's seed, the group, member, branch and prompt, and on the request's number among
the equal requests of its branch. They do not depend on the order in which requests of different branches arrive.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import anyio
import numpy as np

from asyncrl.config.resolve import row_limit
from asyncrl.config.schema import Config
from asyncrl.data.tokenizing import map_call_arguments, to_json
from asyncrl.errors import ConfigError, DataError, EpisodeLimit, GenerationError
from asyncrl.ports import Generate
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import (
    ChatAnswer,
    FinishReason,
    Generation,
    GenerationRequest,
    Int32Array,
    Messages,
    Prompt,
    RoutesArray,
    SamplingParams,
    Trajectory,
)

from .chat import Chat, ComparableMessages, RecordedTurn, normalise, normalise_tools
from .single_turn import episode_seed, hashed_seed
from .tools import Toolbox

# `filtered`: the log-prob after bias, penalties, bans and filters. `version`: -1 for tokens that were not sampled.
_TOKEN = np.dtype(
    [("id", np.int32), ("sampled", np.bool_), ("logprob", np.float32), ("filtered", np.float32), ("version", np.int32)]
)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. None means no limit."""

    max_context: int  # tokens of a request's prompt and reply
    max_turns: int | None = None  # replies
    total: int | None = None  # tokens of all branches, which one microbatch must hold

    @classmethod
    def of(cls, config: Config) -> EpisodeLimits:
        """The limits of a run with this configuration."""
        longest = row_limit(config)
        return cls(longest, config.rollout.max_turns, max(longest, config.train.tokens_per_microbatch))


@dataclass(slots=True)
class Agents:
    """What the episodes of a run share. `sampling`: the defaults of requests. `scores`: whether reward functions or models score an
    episode that returns no reward. `column`: the prompt's column. `version`: returns the current policy version."""

    chat: Chat
    sampling: SamplingParams
    seed: int
    limits: EpisodeLimits
    toolbox: Toolbox
    recorder: Recorder
    version: Callable[[], int]
    scores: bool = True
    column: str = "prompt"
    # Tells the engine that a session makes no more requests. None: the engine does not learn of sessions.
    end_session: Callable[[str], object] | None = None
    # Opens the endpoint of the run for the requests of one branch of a session. Returns (base URL, key).
    open_endpoint: Callable[[Session, str], tuple[str, str]] | None = None
    end_endpoint: Callable[[Session], object] | None = None


class _AnsweredRequest(NamedTuple):
    """A request with a reply. `number`: counts the episode's requests from 0 in the order of their starts. `end`: the index of the
    reply's last token in the tree. `continued_end`: the `end` of the earlier request that this request continues, or -1."""

    number: int
    end: int
    continued_end: int
    generation: Generation


class TokenTree:
    """The tokens of an episode, each once. A prompt's longest prefix that is in the tree is not added again."""

    def __init__(self) -> None:
        self.tokens = np.zeros(0, _TOKEN)
        self.routes: RoutesArray | None = None  # [L, layers, k]
        self.segments: list[tuple[int, int]] = []  # (start, after): first token, token before it or -1
        self.replies: list[int] = []  # index of the first token of each reply
        self.prompt_length = 0  # of the first request

    def add(self, prompt_ids: Int32Array, generation: Generation, continued_end: int = -1) -> int:
        """Add a prompt and its reply. Returns the index of the reply's last token. `continued_end`: as in `_AnsweredRequest`."""
        routes, size = generation.routed_experts, prompt_ids.size + generation.token_ids.size
        if routes is not None and len(routes) != size:
            raise GenerationError(f"the engine returned experts of {len(routes)} tokens for a request of {size}")
        if not self.segments:
            self.prompt_length = prompt_ids.size
        known, after = self._longest_prefix(prompt_ids, continued_end)
        new = np.zeros(prompt_ids.size - known + generation.token_ids.size, _TOKEN)
        new["version"] = -1
        new["id"][: prompt_ids.size - known] = prompt_ids[known:]
        reply = new[prompt_ids.size - known :]
        reply["id"], reply["sampled"] = generation.token_ids, True
        reply["logprob"], reply["filtered"] = generation.logprobs, generation.sampled_logprobs
        reply["version"] = generation.versions
        start = self.tokens.size
        if new.size:
            if after != start - 1 or not start:
                self.segments.append((start, after))
            self.tokens = np.concatenate([self.tokens, new])
        if reply.size:
            self.replies.append(self.tokens.size - reply.size)
        path = np.concatenate([self.path(after), np.arange(start, self.tokens.size)])
        self._add_routes(path, routes)
        return int(path[-1])

    def known(self, prompt_ids: Int32Array, continued_end: int = -1) -> int:
        """The length of the prompt's longest prefix that is in the tree. `continued_end`: as in `_AnsweredRequest`."""
        return self._longest_prefix(prompt_ids, continued_end)[0]

    def path(self, last: int) -> Int32Array:
        """Indices of the tokens from the root to the token `last`."""
        pieces: list[Any] = []
        while last >= 0:
            start, after = next(segment for segment in reversed(self.segments) if segment[0] <= last)
            pieces.append(np.arange(start, last + 1))
            last = after
        return np.concatenate([np.zeros(0, np.int32), *reversed(pieces)]).astype(np.int32)

    def _longest_prefix(self, ids: Int32Array, continued_end: int) -> tuple[int, int]:
        """(length of the longest prefix of `ids` in the tree, index of its last token or -1). If several paths are equally long, a
        path through the token `continued_end` wins."""
        found = (0, False, -1)
        ends = [*(start for start, _ in self.segments), self.tokens.size][1:]
        # For each segment: (depth of its first token, matching tokens from the root on, whether they pass `continued_end`).
        matches: list[tuple[int, int, bool]] = []
        for (start, after), end in zip(self.segments, ends, strict=True):
            depth, passes = 0, False
            if after >= 0:
                parent = max(n for n, (first, _) in enumerate(self.segments) if first <= after)
                first = self.segments[parent][0]
                depth = matches[parent][0] + after - first + 1
                if matches[parent][1] < depth:
                    matches.append((depth, 0, False))
                    continue
                passes = (matches[parent][2] and not first <= continued_end) or first <= continued_end <= after
            wanted = ids[depth : depth + end - start]
            differ = np.flatnonzero(self.tokens["id"][start : start + wanted.size] != wanted)
            size = int(differ[0]) if differ.size else wanted.size
            passes = passes or start <= continued_end < start + size
            matches.append((depth, depth + size, passes))
            if size:
                found = max(found, (depth + size, passes, start + size - 1))
        return found[0], found[2]

    def _add_routes(self, path: Int32Array, routes: RoutesArray | None) -> None:
        """Store the experts of the tokens on `path` that have none yet. A token keeps the experts of its first forward pass, from
        which the next token was sampled. A later request may compute the token again with newer weights. The last token of a
        reply has no experts, because the reply needed no forward pass of this token."""
        if routes is not None and self.routes is None:
            self.routes = np.zeros((0, *routes.shape[1:]), routes.dtype)
        if self.routes is not None:
            more = np.full((self.tokens.size - len(self.routes), *self.routes.shape[1:]), -1, self.routes.dtype)
            self.routes = np.concatenate([self.routes, more])
            if routes is not None:
                known = self.routes[path[:-1]]
                self.routes[path[:-1]] = np.where(known == -1, routes[:-1], known)


class Session:
    """The requests of one episode, recorded. Methods may be called from several tasks of the event loop at the same time."""

    def __init__(self, prompt: Prompt, member: int, group_size: int, generate: Generate, agents: Agents) -> None:
        """Errors: DataError, as `Chat.of_row`."""
        self.chat_format, self.prompt, self.sampling = agents.chat.of_row(prompt.columns), prompt, agents.sampling
        self.agents, self._member, self._group_size = agents, member, group_size
        self._generate, self._limits, self._end_session = generate, agents.limits, agents.end_session
        self._name, self._seed = f"{prompt.group_id}/{member}", episode_seed(agents.seed, prompt.group_id, member)
        # (turn, forms in which a client may send its messages and reply, index of the last token, branch)
        self._exchanges: list[tuple[RecordedTurn, list[ComparableMessages], int, str]] = []
        # Branch and prompt -> numbers of the equal requests that have not failed: 0 for the first, 1 for the second, and so on.
        self._repetitions: dict[bytes, set[int]] = {}
        self.limit: str | None = None  # text of the newest EpisodeLimit
        self._tree, self.ended = TokenTree(), False
        self.notes: dict[str, float] = {}  # become the extras of the trajectory
        # `_expected_tokens`: upper bound of the tokens that running requests add.
        self._replies_and_running = self._expected_tokens = 0
        self._request_ended = anyio.Event()  # set when a running request ends
        # In the order in which the replies arrived.
        self._answered: list[_AnsweredRequest] = []
        self._complete = True  # the tree has no forgotten reply
        self._requests = itertools.count()
        self._temperature: float | None = None

    @property
    def has_all_turns(self) -> bool:
        """Whether replies and running requests together have reached `rollout.max_turns`."""
        return self._limits.max_turns is not None and self._replies_and_running >= self._limits.max_turns

    @property
    def turns(self) -> int:
        """Number of replies that have at least one token."""
        return sum(request.generation.token_ids.size > 0 for request in self._answered)

    async def sample(
        self, prompt_ids: Int32Array | Sequence[int], sampling: SamplingParams | None = None, *, branch: str = ""
    ) -> Generation:
        """Sample a reply to the tokens [P]. `branch`: the name of a parallel branch, which gets random numbers of its own.

        A repeated request samples another reply. A reply that fills the context ends with `length`. Errors: `EpisodeLimit`;
        `ConfigError` for a temperature that differs from earlier requests; `DataError` for no tokens; those of the engine."""
        return (await self._sample(np.asarray(prompt_ids, np.int32), sampling or self.sampling, branch))[0]

    async def chat(
        self, messages: Any, tools: Any = None, sampling: SamplingParams | None = None, *, branch: str = ""
    ) -> ChatAnswer:
        """The reply to a conversation in OpenAI's form. `tools`: None means the tools of the row (`Chat.tools`).

        If the template keeps recorded text, the prompt continues the longest recorded conversation with which `messages` begin.
        Errors: as `sample`; `DataError` for messages or tools that are malformed, or that the chat template refuses."""
        if not self.chat_format.has_template:
            raise ConfigError(
                "messages need a chat template, and the tokenizer has none or data.template is raw; use policy.complete "
                "(/v1/completions), or a model with a template"
            )
        messages, tools = normalise(messages), self.chat_format.tools if tools is None else normalise_tools(tools)
        last, continued_end, prompt_ids, messages = self._find_continued(messages, tools, branch)
        generation, end = await self._sample(prompt_ids, sampling or self.sampling, branch, continued_end)
        # Some templates want ids of 9 letters and digits.
        reply = self.chat_format.parse(prompt_ids, generation, tools, call_id=f"c{end:06d}")
        [recorded] = normalise([reply])
        self._record(last, RecordedTurn(messages, tools, prompt_ids, generation, recorded), end, branch)
        return ChatAnswer(reply, generation, prompt_ids)

    def trajectory(self, reward: float | None = None, turn_rewards: Sequence[float] | None = None) -> Trajectory:
        """The episode's tokens as a trajectory. `turn_rewards`: a reward for each reply with tokens, in the order of the requests.

        Errors: `GenerationError` if there is no reply, `ConfigError` if the number of rewards is wrong."""
        if not self._answered:
            raise GenerationError(
                "the episode got no reply, so there is nothing to train; call the policy before the episode returns"
            )
        if turn_rewards is not None and len(turn_rewards) != self.turns:
            raise ConfigError(
                f"the episode gave {len(turn_rewards)} rewards of turns for {self.turns} replies; give one for each reply"
            )
        tree = self._in_order()
        tokens = tree.tokens
        return Trajectory(
            group_id=self.prompt.group_id,
            member=self._member,
            group_size=self._group_size,
            prompt_length=tree.prompt_length,
            tokens=tokens["id"].copy(),
            mask=tokens["sampled"].copy(),
            logprobs=tokens["logprob"].copy(),
            sampled_logprobs=tokens["filtered"].copy(),
            versions=tokens["version"].copy(),
            temperature=self.sampling.temperature if self._temperature is None else self._temperature,
            finish_reason=max(self._answered).generation.finish_reason,
            completion=self._completion(tree),
            reward=reward,
            extras=dict(self.notes),
            routed_experts=tree.routes,
            branches=np.array(tree.segments[1:], np.int32) if len(tree.segments) > 1 else None,
            turns=np.array(tree.replies, np.int32) if len(tree.replies) > 1 else None,
            turn_rewards=None if turn_rewards is None else tuple(map(float, turn_rewards)),
        )

    def forget(self, generation: Generation) -> None:
        """Remove a reply that no client got. If another request continued the reply, does nothing. Call after the last request."""
        for request in [each for each in self._answered if each.generation is generation]:
            if all(other.continued_end != request.end for other in self._answered):
                self._answered.remove(request)
                self._complete = False
                self._exchanges = [exchange for exchange in self._exchanges if exchange[2] != request.end]

    def _in_order(self) -> TokenTree:
        """The tree as if the replies had come in the order of their requests, because a trajectory must not depend on the speed of
        branches. Forgotten replies are left out."""
        requests = sorted(self._answered)
        if self._complete and requests == self._answered:
            return self._tree
        old, tree, end_of = self._tree, TokenTree(), {-1: -1}
        for each in requests:
            path = old.path(each.end)
            prompt, reply = np.split(old.tokens[path], [path.size - each.generation.token_ids.size])
            columns = reply["id"], reply["logprob"], reply["filtered"], reply["version"]
            generation = Generation(*columns, FinishReason.STOP, None if old.routes is None else old.routes[path])
            end_of[each.end] = tree.add(prompt["id"], generation, end_of[each.continued_end])
        return tree

    def close(self) -> None:
        """End the session: its API keys for the endpoint end, and the engine may free its KV cache."""
        self.ended = True
        if self.agents.end_endpoint is not None:
            self.agents.end_endpoint(self)
        if self._end_session is not None:
            self._end_session(self._name)
            self._end_session = None

    async def _sample(
        self, prompt_ids: Int32Array, sampling: SamplingParams, branch: str, continued_end: int = -1
    ) -> tuple[Generation, int]:
        """The reply, and the index of its last token in the tree."""
        key = b"\0".join((branch.encode(), prompt_ids.tobytes()))
        request_number = next(self._requests)
        added, room = await self._wait_for_room(prompt_ids, sampling, continued_end)
        repetitions = self._repetitions.setdefault(key, set())
        repetition = next(n for n in range(len(repetitions) + 1) if n not in repetitions)
        repetitions.add(repetition)
        max_tokens = min(sampling.max_tokens, room)
        self._replies_and_running += 1
        self._expected_tokens += added + max_tokens
        try:
            generation = await self._generate(
                GenerationRequest(
                    prompt_ids=prompt_ids,
                    sampling=replace(sampling, max_tokens=max_tokens),
                    seed=hashed_seed(struct.pack("<QQ", self._seed, repetition) + key, b"asyncrl-request"),
                    prefix_key=f"{self.prompt.group_id}/{hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).hexdigest()}",
                    # Without `_end_session` nothing would tell the engine to free the KV cache of the session.
                    session=None if self._end_session is None else self._name,
                )
            )
            end = self._tree.add(prompt_ids, generation, continued_end)
        except BaseException:
            self._replies_and_running -= 1
            if not self._replies_and_running:
                self._temperature = None
            repetitions.discard(repetition)
            raise
        finally:
            self._expected_tokens -= added + max_tokens
            self._request_ended.set()
            self._request_ended = anyio.Event()
        # The tree has stored the experts.
        generation = replace(generation, routed_experts=None)
        self._answered.append(_AnsweredRequest(request_number, end, continued_end, generation))
        return generation, end

    async def _wait_for_room(
        self, prompt_ids: Int32Array, sampling: SamplingParams, continued_end: int
    ) -> tuple[int, int]:
        """(number of the prompt's tokens that are not in the tree, limit for the reply's tokens). A request beyond a limit waits
        for the running requests: an error now could end the episode before its first reply, and a running request may use fewer
        tokens than its limit. Errors: as `_room`."""
        while True:
            added = prompt_ids.size - self._tree.known(prompt_ids, continued_end)
            try:
                return added, self._room(prompt_ids, sampling, added)
            except EpisodeLimit as error:
                if not self._expected_tokens:
                    self.limit = str(error)
                    raise
            await self._request_ended.wait()

    def _room(self, prompt_ids: Int32Array, sampling: SamplingParams, added: int) -> int:
        """The limit for the tokens of a reply, at least 1. `added`: the number of the prompt's tokens that are not in the tree.
        Errors: `EpisodeLimit`, `ConfigError`, `DataError`."""
        limits = self._limits
        if not prompt_ids.size:
            raise DataError("a request has no token; expected at least one")
        if self.has_all_turns:
            raise EpisodeLimit(
                f"the episode has {self._replies_and_running} replies; rollout.max_turns allows {limits.max_turns}; end the "
                "episode, or raise the setting"
            )
        if prompt_ids.size >= limits.max_context:
            raise EpisodeLimit(
                f"the request has {prompt_ids.size} tokens; rollout.max_context allows {limits.max_context} together with the "
                "reply; end the episode, shorten its messages, or raise the setting"
            )
        room = limits.max_context - prompt_ids.size
        if limits.total is not None:
            tokens = self._tree.tokens.size + self._expected_tokens + added
            if tokens >= limits.total:
                raise EpisodeLimit(
                    f"all branches of the episode would have {tokens} tokens, running requests included; the larger of "
                    f"rollout.max_context and train.tokens_per_microbatch allows {limits.total}; end the episode, or raise one of "
                    "the two settings"
                )
            room = min(room, limits.total - tokens)
        if self._temperature is None:
            self._temperature = sampling.temperature
        if sampling.temperature != self._temperature:
            raise ConfigError(
                f"a request asks for temperature {sampling.temperature:g}, and an earlier request of this episode for "
                f"{self._temperature:g}; an episode has one temperature: leave temperature out, or set rollout.temperature"
            )
        return room

    def _find_continued(
        self, messages: Messages, tools: list[Any], branch: str
    ) -> tuple[RecordedTurn | None, int, Int32Array, Messages]:
        """(the recorded turn that the request continues or None, index of that turn's last token or -1, prompt of the request,
        messages with the replies as they were recorded)."""
        best: tuple[tuple[int, bool, int], RecordedTurn, int, Messages] | None = None
        sent = ComparableMessages(messages)
        for number, (turn, spellings, end, of_branch) in enumerate(self._exchanges):
            for spelling in spellings:
                if not spelling.is_beginning_of(sent):
                    continue
                priority = (len(spelling), of_branch == branch, number)
                if best is None or priority > best[0]:
                    best = priority, turn, end, [*turn.messages, turn.reply, *messages[len(spelling) :]]
        cause = "messages"
        if best is not None:
            _, turn, end, messages = best
            tools = turn.tools if turn.tools == tools else tools
            ids = self.chat_format.extend(turn, messages, tools)
            if ids is not None:
                return turn, end, ids, messages
            cause = "template" if turn.tools == tools else "tools"
        is_repeated = any(turn.messages == messages for turn, *_ in self._exchanges)
        has_history = best is not None or any(of_branch == branch for *_, of_branch in self._exchanges)
        if has_history and not is_repeated:
            self.chat_format.count_fork(cause)
        return None, -1, self.chat_format.render(messages, tools), messages

    def _record(self, last: RecordedTurn | None, new: RecordedTurn, end: int, branch: str) -> None:
        """Record a request and its reply, for requests that continue them. `last`: the turn that this request continued."""
        messages, reply = new.messages, new.reply
        spellings = [[*messages, reply]]
        if messages[-1]["role"] == "assistant":
            # The reply continues the last message. A client may send both as one message, or as two.
            whole = {**messages[-1], **reply, "content": messages[-1]["content"] + reply["content"]}
            spellings.append([*messages[:-1], whole])
            if last is None:
                new = replace(new, messages=messages[:-1], reply=whole)
            else:
                ids = np.concatenate([new.prompt_ids[last.prompt_ids.size :], new.generation.token_ids]).astype(
                    np.int32
                )
                generation = replace(new.generation, token_ids=ids)
                [whole] = normalise([self.chat_format.parse(last.prompt_ids, generation, new.tools)])
                new = RecordedTurn(messages[:-1], new.tools, last.prompt_ids, generation, whole)
            spellings.append([*new.messages, new.reply])
        self._exchanges.append((new, [ComparableMessages(each) for each in spellings], end, branch))

    def _completion(self, tree: TokenTree) -> str | Messages:
        """The messages after those of the first request, up to the last reply. A text if no request had messages."""
        if not self._exchanges:
            path = tree.path(tree.tokens.size - 1)
            ids = tree.tokens["id"][path[path >= tree.prompt_length]]
            return self.chat_format.decode(ids[: ids.size - self.chat_format.has_ended(max(self._answered).generation)])
        number_of = {request.end: request.number for request in self._answered}
        exchanges = sorted(self._exchanges, key=lambda exchange: number_of[exchange[2]])
        first, last = exchanges[0][0], exchanges[-1][0]
        shared = len(first.messages) if last.messages[: len(first.messages)] == first.messages else 0
        return [map_call_arguments(message, to_json) for message in [*last.messages[shared:], last.reply]]
