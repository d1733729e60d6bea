"""Agents: the coroutine `episode(task, policy)` that a user writes, and the policy that the coroutine gets.

Agents             what the episodes of a run share
  AgentEnvironment   plays one coroutine function: an `Environment`
    AgentPolicy             of one episode: an interface to its `Session`, which records all tokens
      Reply              of one request
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from asyncrl.errors import ConfigError, DataError, EpisodeLimit, GenerationError, LifecycleError, shown
from asyncrl.ports import Generate
from asyncrl.types import (
    FinishReason,
    Float32Array,
    Generation,
    Int32Array,
    Messages,
    Prompt,
    SamplingParams,
    Trajectory,
)

from .session import Agents, Session
from .tools import AnyTool, Tool, Toolbox, as_tool

# A coroutine function `episode(task, policy)`.
EpisodeFunction: TypeAlias = Callable[[dict[str, Any], "AgentPolicy"], Awaitable[Any]]
_NAME = re.compile(r"(?=.{1,100}$)[\w@: -][\w@:. -]*(/[\w@: -][\w@:. -]*)*")  # metric names that every sink takes
_SAMPLING = {each.name for each in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request. `message`: in OpenAI's form, to be appended to the messages. `logprobs` [C]: at the sampling
    temperature over the whole vocabulary. `versions` [C]: of the weights that sampled each token."""

    message: dict[str, Any]
    prompt_ids: Int32Array  # [P]
    token_ids: Int32Array  # [C] sampled
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason
    _tools: Sequence[Tool] = field(repr=False)
    _toolbox: Toolbox = field(repr=False)

    @property
    def text(self) -> str:
        """The content of the message, without reasoning and without calls of tools."""
        return str(self.message.get("content") or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools in OpenAI's form. `arguments` are JSON text that the model wrote."""
        return list(self.message.get("tool_calls") or ())

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and the reply: the beginning of the next prompt of `complete`."""
        return [*self.prompt_ids.tolist(), *self.token_ids.tolist()]

    async def run_tools(self) -> Messages:
        """Make the calls of this reply at the same time. Returns their messages in order. A failure is a text for the model."""
        return await self._toolbox.run(self._tools, self.tool_calls)


class AgentPolicy:
    """The policy for one episode. All requests are recorded with their tokens, log-probs and versions."""

    def __init__(self, session: Session, branch: str = "") -> None:
        self._session = session
        self._branch = branch
        self._branches = 0
        self._address: tuple[str, str] | None = None  # (base URL, key)

    async def chat(self, messages: Messages | str, *, tools: Sequence[AnyTool] | None = None, **sampling: Any) -> Reply:
        """The reply to a conversation in OpenAI's form. If `messages` continue an earlier conversation, its tokens are kept.

        `tools`: functions with types and a docstring, or `Tool`s; None: the model may call the tools of the row's column `tools`,
        and the caller runs them. `sampling`: fields of `SamplingParams`, such as `max_tokens`.
        Errors: EpisodeLimit, DataError, ConfigError, those of the engine."""
        known = [as_tool(tool) for tool in tools or ()]
        schemas = None if tools is None else [dict(tool.schema) for tool in known]
        answer = await self._open_session.chat(messages, schemas, self._sampling(sampling), branch=self._branch)
        return self._reply(answer.message, answer.prompt_ids, answer.generation, known)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """The completion of a text or of token ids, without a chat template. A text is encoded by `encode`. `Reply.ids` and
        `encode` make the ids of a next request, which continue the sampled tokens. Errors: as `chat`."""
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = np.asarray(ids, np.int32)
        generation = await self._open_session.sample(prompt_ids, self._sampling(sampling), branch=self._branch)
        text = self._session.format.parse(prompt_ids, generation)["content"]
        return self._reply({"role": "assistant", "content": text}, prompt_ids, generation, ())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, such as a tool's result. Control tokens in the text are encoded as plain text."""
        return list(map(int, self._session.format.encode(text)))

    def branch(self, name: str | None = None) -> AgentPolicy:
        """A policy for a sub-agent or a parallel try, with random numbers of its own. The tokens belong to this episode. `name`:
        needed only if the order of the calls of `branch` differs from one play to the next."""
        self._branches += name is None
        return AgentPolicy(self._session, f"{self._branch}/{self._branches if name is None else name}")

    def note(self, name: str, value: float) -> None:
        """Record a number of this episode. Replaces an earlier number of this name. The metric `own/NAME` of a step is the mean
        over its episodes. Errors: DataError for an invalid name or value, LifecycleError after the episode."""
        self._open_session.notes |= as_numbers({name: [value]}, 1, "policy.note", "own/")[0]

    @property
    def version(self) -> int:
        """The policy version of the run now: the number of optimizer steps so far; a step without scored tokens counts."""
        return self._session.agents.version()

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's or Anthropic's protocol, together with `api_key`. The first use opens the endpoint."""
        return self._endpoint()[0]

    @property
    def api_key(self) -> str:
        """The key that belongs to this episode alone."""
        return self._endpoint()[1]

    def _endpoint(self) -> tuple[str, str]:
        session = self._open_session
        if session.agents.open_endpoint is None:
            raise ConfigError("policy.base_url: this run has no endpoint; it needs the extra [http]")
        if self._address is None:
            self._address = session.agents.open_endpoint(session, self._branch)
        return self._address

    @property
    def _open_session(self) -> Session:
        if self._session.ended:
            raise LifecycleError("policy: the episode has ended; await all requests before the coroutine returns")
        return self._session

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        if unknown := given.keys() - _SAMPLING:
            raise ConfigError(f"policy: {sorted(unknown)[0]!r} is unknown; expected: {', '.join(sorted(_SAMPLING))}")
        return replace(self._session.sampling, **given)

    def _reply(
        self, message: dict[str, Any], prompt_ids: Int32Array, generation: Generation, tools: Sequence[Tool]
    ) -> Reply:
        columns = generation.token_ids, generation.logprobs, generation.versions, generation.finish_reason
        return Reply(message, prompt_ids, *columns, tools, self._session.agents.toolbox)


class AgentEnvironment:
    """Plays the episodes of one coroutine function. See `loading.load_environment`."""

    def __init__(self, agents: Agents, episode: EpisodeFunction) -> None:
        self._agents, self._play = agents, episode

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        """Errors: those of the coroutine; ConfigError and DataError for what it returned."""
        agents = self._agents
        session = Session(prompt, member, group_size, generate, agents)
        limited = False
        try:
            try:
                result = await self._play(self._task(prompt), AgentPolicy(session))
            finally:
                session.close()
        except Exception as error:
            if not (session.turns and _is_limit(error, session.limit)):
                raise
            # The coroutine did not catch the error of the limit. The tokens that were sampled are trained.
            agents.recorder.count("rollout/limited")
            limited, result = True, None if agents.scores else 0.0
        try:
            reward, turn_rewards = _rewards(result)
            if reward is None and not agents.scores:
                raise ConfigError(
                    "the episode returned no reward, and the run has no reward functions to score it; return a number, or set "
                    "reward.functions"
                )
            trajectory = session.trajectory(reward, turn_rewards)
        except (ConfigError, DataError, GenerationError) as error:
            # The coroutine has returned, so no line of the user is in the traceback.
            raise type(error)(f"{error} ({_definition(self._play)})") from None
        if limited and not session.has_all_turns:
            # A limit of tokens cut the text. A limit of turns cuts no text, so the finish reason of the last reply stays.
            trajectory = replace(trajectory, finish_reason=FinishReason.LENGTH)
        return trajectory

    def _task(self, prompt: Prompt) -> dict[str, Any]:
        """The row. Each episode gets a copy, because an episode may append to a list of messages in its row."""
        row = dict(prompt.columns)
        if prompt.ids.size:
            row |= {self._agents.column: prompt.prompt, "prompt": prompt.prompt}
        return copy.deepcopy(row)


def _definition(function: Any) -> str:
    """`file:line in name` of a function, or of the class of a callable object."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else repr(function)


def _is_limit(error: BaseException, limit: str | None) -> bool:
    """Whether the error, or each error in a group of a user's tasks, is an EpisodeLimit. A client of the endpoint raises its own
    error, which contains the text of the limit."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_limit(each, limit) for each in error.exceptions)
    return isinstance(error, EpisodeLimit) or (limit is not None and limit in str(error))


def _rewards(result: Any) -> tuple[float | None, list[float] | None]:
    """(reward of the episode, rewards of its turns) for what a coroutine returned."""
    if result is None:
        return None, None
    if isinstance(result, list | tuple) or getattr(result, "shape", None):
        turns = [_number(value) for value in result]
        # Refuses an infinite sum, for which fsum raises OverflowError.
        _number(sum(turns))
        return math.fsum(turns), turns
    return _number(result), None


def _number(value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, bool | int | float):
        raise ConfigError(
            f"the episode returned {shown(value)}; expected a number, None (reward functions score the episode), or a list with a "
            "number for each reply"
        )
    if (number := _finite(plain)) is None:
        raise DataError(f"the episode returned the reward {shown(plain)}; expected a finite number")
    return number


def _finite(value: Any) -> float | None:
    """None if the value is not a finite number. Tensors and arrays of one number have `item`. JSON that a model wrote may hold an
    integer above the largest float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(plain, str | bytes) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def as_numbers(named: Mapping[str, Any], count: int, argument: str, prefix: str = "") -> list[dict[str, float]]:
    """For each of `count` members: name -> number. `named`: name -> a list with a value for each member, or one value for all
    members; a value is a number or None, which is left out. `argument` is for errors. Errors: DataError."""
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    for name, values in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(f"{argument}: {name!r:.80} is not a name: letters, digits, _-.:@, parts between slashes")
        has_many = isinstance(values, list | tuple) or bool(getattr(values, "shape", None))
        member_values = list(values) if has_many else [values] * count
        if len(member_values) != count:
            raise DataError(f"{argument}: {name} has {len(member_values)} values for {count} trajectories")
        for member, value in enumerate(member_values):
            if value is None:
                continue
            if (number := _finite(value)) is None:
                raise DataError(f"{argument}: {name} {member} is {shown(value)}; expected a finite number, or None")
            rows[member][f"{prefix}{name}"] = number
    return rows
