"""Plays the episodes of an agent: a coroutine function `episode(task, policy)` that a user writes.

AgentEnvironment   one for the run: the `Environment` that calls the coroutine function
AgentPolicy        one for each branch of an episode: the argument `policy`, an interface to the `Session`, which records all tokens
Reply              one for each request to the policy
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
_NAME = re.compile(r"(?=.{1,100}$)[\w@: -][\w@:. -]*(/[\w@: -][\w@:. -]*)*")  # names that every metric sink accepts
_SAMPLING = {each.name for each in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request. `message`: in OpenAI's form; append it to the messages. `logprobs` [C]: normalised over the whole
    vocabulary, at the sampling temperature (greedy: at 1). `versions` [C]: the policy version whose weights sampled each token."""

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
        """The content of the message, without reasoning and without tool calls."""
        return str(self.message.get("content") or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls in OpenAI's form. `arguments` is the text of a JSON object, which need not fit the tool."""
        return list(self.message.get("tool_calls") or ())

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt and the reply. To continue the reply, begin the prompt of `complete` with these ids."""
        return [*self.prompt_ids.tolist(), *self.token_ids.tolist()]

    async def run_tools(self) -> Messages:
        """Run the tool calls of this reply concurrently. Returns a message for each call, in order, also for a failed call."""
        return await self._toolbox.run(self._tools, self.tool_calls)


class AgentPolicy:
    """The policy for one branch of an episode. Every request with a reply is recorded: its tokens, log-probs and versions."""

    def __init__(self, session: Session, branch: str = "") -> None:
        self._session, self._branch = session, branch
        self._branches = 0  # calls of `branch` without a name
        self._address: tuple[str, str] | None = None  # (base URL, key)

    async def chat(self, messages: Messages | str, *, tools: Sequence[AnyTool] | None = None, **sampling: Any) -> Reply:
        """The reply to a conversation in OpenAI's form. If `messages` continue an earlier conversation, its token ids are reused.

        `tools`: functions with types and a docstring, or `Tool`s. `Reply.run_tools` runs their calls. None: the model may call the
        tools of the row's column `tools` or of `data.chat_template_kwargs`, and your code runs the calls. `sampling`: fields of
        `SamplingParams`. Errors: EpisodeLimit, DataError, ConfigError, those of the engine."""
        known = [as_tool(tool) for tool in tools or ()]
        schemas = None if tools is None else [dict(tool.schema) for tool in known]
        answer = await self._open_session.chat(messages, schemas, self._sampling(sampling), branch=self._branch)
        return self._reply(answer.message, answer.prompt_ids, answer.generation, known)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """The completion of a text or of token ids, without a chat template. `encode` encodes a text. To continue a reply, pass
        `reply.ids + policy.encode(text)`. Errors: as `chat`."""
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = np.asarray(ids, np.int32)
        generation = await self._open_session.sample(prompt_ids, self._sampling(sampling), branch=self._branch)
        text = self._session.chat_format.parse(prompt_ids, generation)["content"]
        return self._reply({"role": "assistant", "content": text}, prompt_ids, generation, ())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, such as a tool's result. Control tokens in the text are encoded as plain text."""
        return list(map(int, self._session.chat_format.encode(text)))

    def branch(self, name: str | None = None) -> AgentPolicy:
        """A policy for a sub-agent or a parallel try, with random numbers of its own. The tokens belong to this episode. `name`:
        only needed if the calls of `branch` may come in another order when the episode is played again."""
        self._branches += name is None
        # `repr` puts a name in quotation marks, so the name equals no number and no path of other branches.
        return AgentPolicy(self._session, f"{self._branch}/{self._branches if name is None else repr(str(name))}")

    def note(self, name: str, value: float) -> None:
        """Record a number of this episode, which replaces an earlier number of this name. The metric `own/NAME` of a step is the
        mean over the episodes with this name. Errors: DataError for an invalid name or value, LifecycleError after the episode."""
        self._open_session.notes |= as_numbers({name: [value]}, 1, "policy.note", "own/")[0]

    @property
    def version(self) -> int:
        """The current policy version of the run: the number of optimizer steps. A step whose loss has no tokens counts, too."""
        return self._session.agents.version()

    @property
    def base_url(self) -> str:
        """The URL for clients of OpenAI's or Anthropic's protocol, which also need `api_key`. The first use opens the endpoint."""
        return self._endpoint()[0]

    @property
    def api_key(self) -> str:
        """The key for requests that belong to this policy. Each policy (of an episode or a branch) has a key of its own."""
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
    """Plays episodes by calls of one coroutine function. `loading.load_environment` makes this object."""

    def __init__(self, agents: Agents, episode: EpisodeFunction) -> None:
        self._agents, self._play = agents, episode

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        """Errors: those of the coroutine; ConfigError and DataError for what it returned; GenerationError if it got no reply."""
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
            # The coroutine did not catch the error of the limit. The tokens that it sampled are trained nevertheless.
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
            # The coroutine has returned, so the traceback has no line of the user's code. Name the function instead.
            raise type(error)(f"{error} ({_definition(self._play)})") from None
        if limited and not session.has_all_turns:
            # A limit of tokens ended the episode. A limit of turns cuts no text, so the finish reason of the last reply stays.
            trajectory = replace(trajectory, finish_reason=FinishReason.LENGTH)
        return trajectory

    def _task(self, prompt: Prompt) -> dict[str, Any]:
        """The argument `task`: a copy of the row, because an episode may append to a list of messages in its row."""
        row = dict(prompt.columns)
        if prompt.ids.size:
            row |= {self._agents.column: prompt.prompt, "prompt": prompt.prompt}
        return copy.deepcopy(row)


def _definition(function: Any) -> str:
    """`file:line in name` of a function, or of the `__call__` of another object."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else repr(function)


def _is_limit(error: BaseException, limit: str | None) -> bool:
    """Whether an EpisodeLimit caused the error, or caused all errors in an ExceptionGroup. `limit`: the text of the newest
    EpisodeLimit or None. An HTTP client raises an error of its own class, which contains this text."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_limit(each, limit) for each in error.exceptions)
    return isinstance(error, EpisodeLimit) or (limit is not None and limit in str(error))


def _rewards(result: Any) -> tuple[float | None, list[float] | None]:
    """(reward of the episode, rewards of its turns) from the value that a coroutine returned. None: not given."""
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
    """The value as a float, or None if it is not a finite number. Tensors and arrays of one number have `item`. JSON that a model
    wrote may hold an integer above the largest float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(plain, str | bytes) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def as_numbers(named: Mapping[str, Any], count: int, argument: str, prefix: str = "") -> list[dict[str, float]]:
    """For each of `count` members: name with `prefix` -> number. `named`: name -> a list with a value for each member, or one value
    for all members. A value is a number or None, which is left out. `argument`: name of `named` in errors. Errors: DataError."""
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    for name, values in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(f"{argument}: {name!r:.80} is not a name: up to 100 letters, digits, spaces, _-.:@/")
        has_many = isinstance(values, list | tuple) or bool(getattr(values, "shape", None))
        member_values = list(values) if has_many else [values] * count
        if len(member_values) != count:
            raise DataError(f"{argument}: {name} has {len(member_values)} values for {count} trajectories")
        for member, value in enumerate(member_values):
            if value is None:
                continue
            if (number := _finite(value)) is None:
                which = f" of member {member}" if count > 1 else ""
                raise DataError(f"{argument}: {name}{which} is {shown(value)}; expected a finite number, or None")
            rows[member][f"{prefix}{name}"] = number
    return rows
