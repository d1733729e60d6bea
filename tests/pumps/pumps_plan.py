"""What happens in a house, and the parts of it that are scripted because their time and their failures are the subject:
prompts, environment, reward, and the engines that take new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import numpy as np
from support.trajectories import trajectory

from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.types import Prompt, Trajectory

if TYPE_CHECKING:
    from pumps_house import House


TOKENS = 4  # of a scripted completion
PROMPT_TOKENS = 2
Seconds = Callable[[int, int], float]  # (group, member) -> seconds
Failure = Callable[[int, int], BaseException | None]


class Event(NamedTuple):
    at: float
    what: str
    groups: tuple[int, ...] = ()
    version: int = -1


def _nothing(group: int, member: int) -> None:
    return None


@dataclass(frozen=True)
class Plan:
    """What happens in the house. Times in virtual seconds, `trainer_fails[("finish", 2)]`: the second such call."""

    preset: str = "async"
    groups_per_step: int = 2
    group_size: int = 2
    max_staleness: int | None = None
    streaming: bool | None = None
    late: str = "wait"
    rollout: Mapping[str, Any] = field(default_factory=dict)  # more settings of that section
    prompts: int | None = None  # None: endless
    cursor: Callable[[], Any] | None = None  # a real one instead
    reroll: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int | None = None
    max_epochs: float | None = None
    time_limit_s: float | None = None
    partial_final_step: bool = True
    max_failed_groups: int | None = 0
    retries: int = 0
    updates_per_batch: int = 1
    minibatches: int = 1
    old_logprobs: str = "recompute"
    advantage_name: str = "grpo"
    algorithm: Mapping[str, Any] = field(default_factory=dict)  # more settings of that section
    workers: int = 2
    tokens_per_microbatch: int = 64
    rollout_s: Seconds = lambda group, member: 1.0
    cleanup_s: float = 0.0  # how long a cancelled episode cleans up after itself
    reward_s: Seconds = lambda group, member: 0.0
    fails: Failure = _nothing
    replay: Mapping[str, Any] = field(default_factory=dict)
    score_groups: bool = False  # one call of the reward for all members, which then work in parallel
    reward_config: Mapping[str, Any] = field(default_factory=dict)
    reward_fails: Failure = _nothing
    reward: Callable[[int, int], float | None] = lambda group, member: float((group + member) % 3)
    component: Callable[[float], float] = lambda reward: reward
    publish_s: Callable[[int, int], float] = lambda version, sink: 0.0
    publish_fails: Mapping[int, Exception] = field(default_factory=dict)  # by version
    sinks: int = 1
    trainer_fails: Mapping[tuple[str, int], BaseException] = field(default_factory=dict)
    advantage: Callable[[Sequence[float | None]], Any] | None = None
    train_config: Mapping[str, Any] = field(default_factory=dict)
    train_token_s: float = 0.001
    finish_s: float = 0.01
    engine: bool = False  # tokens from the dry-run engine instead of the script
    held_out: int = 0
    evaluate_every: int | None = None
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    evaluation_s: float = 1.0

    @property
    def versions(self) -> int:
        """Of one batch."""
        return self.updates_per_batch * self.minibatches

    def config(self) -> Config:
        given = Config.model_validate(
            {
                "preset": self.preset,
                "data": {"max_prompt_tokens": PROMPT_TOKENS, "eval": "held out" if self.held_out else None},
                "rollout": {
                    "group_size": self.group_size,
                    "groups_per_step": self.groups_per_step,
                    "max_staleness": self.max_staleness,
                    "streaming": self.streaming,
                    "late": self.late,
                    "max_tokens": TOKENS,
                    "max_failed_groups": self.max_failed_groups,
                    "retries": self.retries,
                    **self.rollout,
                },
                "reward": {"workers": self.workers, **self.reward_config},
                "replay": dict(self.replay),
                "reroll": dict(self.reroll),
                "engine": {"kind": "dry_run"},
                "algorithm": {
                    "updates_per_batch": self.updates_per_batch,
                    "minibatches": self.minibatches,
                    "old_logprobs": self.old_logprobs,
                    "advantage": self.advantage_name,
                    **self.algorithm,
                },
                "train": {
                    "kind": "dry_run",
                    "max_steps": self.max_steps,
                    "max_epochs": self.max_epochs,
                    "time_limit_s": self.time_limit_s,
                    "partial_final_step": self.partial_final_step,
                    "tokens_per_microbatch": self.tokens_per_microbatch,
                    **self.train_config,
                },
                "evaluate": {"every": self.evaluate_every, **self.evaluate},
            }
        )
        return resolve(given, embedding=True)


def make_prompt(group_id: int) -> Prompt:
    return Prompt(group_id, (10_000 * (group_id + 1) + np.arange(PROMPT_TOKENS)).astype(np.int32), f"prompt {group_id}")


def make_trajectory(
    group_id: int, member: int, group_size: int, versions: Sequence[int], reward: float | None = None
) -> Trajectory:
    """PROMPT_TOKENS of prompt, then one sampled token per version. No two groups or members have tokens in common."""
    found = [-1] * PROMPT_TOKENS + list(versions)
    tokens = 10_000 * (group_id + 1) + np.arange(len(found))
    tokens[PROMPT_TOKENS:] += 100 * (member + 1)
    return trajectory(group_id, member, group_size, tokens, version=found, reward=reward)


class Prompts:
    """The prompt cursor: group ids 0, 1, 2, ... up to `count`."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.delivered = 0

    def next(self) -> Prompt | None:
        if self.count is not None and self.delivered >= self.count:
            return None
        self.delivered += 1
        return make_prompt(self.delivered - 1)


def episode_ports(environment: Any, recorder: Any, timeout_s: float = 60.0, retries: int = 0, **rest: Any) -> Any:
    """What of the ports an episode needs; `rest`: of the plan of the run."""
    config = Plan(retries=retries, rollout={"timeout_s": timeout_s}, **rest).config()
    return SimpleNamespace(config=config, environment=environment, recorder=recorder, logged=set())


class ScriptedEnvironment:
    """TOKENS tokens spread evenly over `plan.rollout_s`; each carries the version its engine has at that moment."""

    def __init__(self, house: House) -> None:
        self.house = house

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
        house, group = self.house, prompt.group_id
        seconds = house.plan.rollout_s(group, member) if group >= 0 else house.plan.evaluation_s
        engine = house.sinks[(group + member) % len(house.sinks)]
        house.note("rollout starts", group, version=engine.version)
        versions = []
        try:
            for _ in range(TOKENS):
                versions.append(engine.version)
                await anyio.sleep(seconds / TOKENS)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(house.plan.cleanup_s)
            house.note("rollout gives up", group)
            raise
        failure = house.plan.fails(group, member)
        if failure is not None:
            raise failure
        house.note("rollout ends", group, version=versions[0])
        return make_trajectory(group, member, group_size, versions)


class ScriptedReward:
    def __init__(self, house: House) -> None:
        self.house = house

    async def __aenter__(self) -> ScriptedReward:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        plan, scored = self.house.plan, []
        self.house.reward_calls.append(tuple((t.group_id, t.member) for t in trajectories))
        for t in trajectories:
            group, member = t.group_id, t.member
            await anyio.sleep(plan.reward_s(group, member))
            failure = plan.reward_fails(group, member)
            if failure is not None:
                raise failure
            value = plan.reward(group, member)
            component = None if value is None else plan.component(value)
            extras = {} if value is None else {"scripted/right": value > 0, "scripted/said": "text"}
            scored.append(replace(t, reward=value, components={"scripted": component}, extras=extras))
        return scored


class Lease:
    """Memory of somebody else's in which a group lies. Notes its end in the log of the house."""

    def __init__(self, house: House, group: int) -> None:
        self.house, self.group, self.ended = house, group, 0

    def release(self) -> None:
        self.ended += 1
        self.house.note("lease ends", self.group)

    def __str__(self) -> str:
        return f"group {self.group} of somebody"


class Replica:
    """A WeightSink: an engine with weights of its own, which it takes over after `plan.publish_s`."""

    def __init__(self, house: House, index: int, version: int = 0) -> None:
        self.house, self.index, self.version = house, index, version

    async def update_weights(self, version: int) -> None:
        await anyio.sleep(self.house.plan.publish_s(version, self.index))
        if version in self.house.plan.publish_fails:
            raise self.house.plan.publish_fails[version]
        self.house.note("weights taken", version=version)
        self.version = version
