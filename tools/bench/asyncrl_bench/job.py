"""The task of one run as data, and what both sides share: the model directory, the prompts, the reward.

Everything made here is made once and kept in the cache directory; both sides read the same files.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from argparse import Namespace
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

PEERS = Path(__file__).parent / "peers"
REWARD = PEERS / "letter_reward.py"
REWARD_FUNCTION = "vowel_share"
MODELS = ("smollm2", "tiny", "small", "gpt_oss", "qwen3_moe", "qwen3_600m")
LIGER = "asyncrl_liger"  # side of `bench head`
RING = "asyncrl-bench-"  # and the process: what children call their shared memory
Dtype = Literal["float32", "bfloat16"]
Lengths = Literal["natural", "fixed"]
Device = Literal["cpu", "cuda"]


class BenchError(Exception):
    """A side could not be measured; the message says which, and where its log is."""


class Job:
    """Written as JSON: the children, and the peers' scripts, read the same keys."""

    threads: int  # of each side

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")  # type: ignore[call-overload]
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    @classmethod
    def asked(cls, options: Namespace, **others: Any) -> Self:
        """What the options have by the name of a field, and the others, which come first."""
        names = [each.name for each in fields(cls) if hasattr(options, each.name)]  # type: ignore[arg-type]
        return cls(**{name: getattr(options, name) for name in names} | others)

    def of(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class ModelJob(Job):
    """To make one of `MODELS`."""

    name: str
    model: str  # directory
    threads: int = 1


@dataclass(frozen=True, slots=True)
class RatesJob(Job):
    """What this machine can do, and the size of the model."""

    model: str
    dtype: Dtype
    threads: int
    prompts: str = ""  # their lengths too, if any
    memory: bool = False  # the rate of reading it too
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class StepJob(Job):
    """Whole RL steps of one side."""

    model: str  # directory in Hugging Face form
    prompts: str  # JSONL, each row {"prompt": messages}
    groups_per_step: int
    group_size: int
    max_tokens: int
    max_prompt_tokens: int
    dtype: Dtype
    lengths: Lengths  # natural: until the end-of-sequence token; fixed: always max_tokens
    threads: int
    warmup_steps: int  # left out of the figures
    steps: int
    seed: int = 0
    lr: float = 1e-6
    overrides: tuple[str, ...] = ()  # asyncrl's side: `a.b=value`, after everything above
    gradient_checkpointing: bool = False  # TRL's side (its own default is True, which is slower)
    float32_masters: bool = False  # TRL's side in bfloat16: float32 weights under autocast, else bfloat16 ones (faster)
    microbatch: int = 16  # TRL's side: sequences of one forward and backward
    agent: str = ""  # TRL's side of `bench agents`: a function of waiting_agent.py
    trl_form: Literal["rollout_func", "tools"] = "rollout_func"  # the same side
    max_context: int = 512  # the same side
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class TrainJob(Job):
    """Training alone, of random tokens: what a token is changes no cost."""

    model: str
    groups: int
    group_size: int
    prompt_tokens: int  # about; each group draws its own, up to three fewer or two more
    mean_tokens: int  # of the geometric distribution of completion lengths, cut to [4, max_tokens]
    max_tokens: int
    dtype: Dtype
    threads: int
    warmup_steps: int
    steps: int
    profile: bool  # one more step, under torch's profiler
    tokens_per_microbatch: int | None = None  # None: the default of asyncrl's settings
    packed: bool = False  # on the packed path; else on the fastest that the model's parts allow
    seed: int = 0
    lr: float = 1e-6


@dataclass(frozen=True, slots=True)
class HeadJob(Job):
    """The head alone on random hidden states: `memory` of one side, or `time` of several in turns."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: Dtype
    threads: int
    measure: Literal["memory", "time"]
    side: str  # of `memory`
    loss: str
    steps: int
    sequences: int  # of equal length
    temperature: float = 0.8
    seed: int = 0
    device: str = "cpu"
    liger: bool = False  # of `time`: asyncrl's head by Liger's kernels, too


@dataclass(frozen=True, slots=True)
class GenerateJob(Job):
    """Generation alone. `prompts`: JSON, the token ids of each group's prompt; completions are always `max_tokens` long."""

    model: str
    prompts: str
    sequences: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    dtype: Dtype
    threads: int
    warmup_tokens: int  # of each of as many other sequences, before the clock starts
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TurnsJob(GenerateJob):
    """Episodes of `turns` requests. `sequences`: episodes. `max_tokens`: of each reply. `kept_prefix_max_age`: of the engine."""

    turns: int = 4
    tool_tokens: int = 32  # behind each reply
    kept_prefix_max_age: int = 1


@dataclass(frozen=True, slots=True)
class SweepJob(Job):
    """Decode steps at every number of sequences and every context."""

    model: str
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: Dtype
    threads: int
    warmup_steps: int
    steps: int
    cache_gib: float  # cells whose keys and values need more are left out
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HandoverJob(Job):
    """Groups of 16 trajectories handed from one process to another, by one side."""

    side: str
    loop: str  # asyncio or uvloop; "" where the side has no choice
    tokens: int  # of each trajectory
    groups: int  # hand-overs at most
    pace_s: float  # at least this long between two; 0: full speed
    seconds: float  # no new hand-over after that
    threads: int = 1

    def turns(self) -> dict[str, Any]:
        """What `peers.handover_group.turns` asks."""
        return {"groups": self.groups, "pace_s": self.pace_s, "seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class BroadcastJob(Job):
    """Versions of the weights to other processes."""

    model: str
    dtype: Dtype
    receivers: int
    versions: int
    decodes: bool = False  # the one receiver samples meanwhile
    sequences: int = 8
    pause_s: float = 0.0  # between two versions
    threads: int = 1
    lora_rank: int = 0  # adapters travel


def write_token_prompts(job: GenerateJob, vocabulary: int) -> None:
    """Random prompts, one per group, and again as many for the warm-up: nothing of theirs is found in a cache."""
    draw = random.Random(job.seed)
    count = 2 * -(-job.sequences // job.group_size)
    rows = [[draw.randrange(10, vocabulary) for _ in range(job.prompt_tokens)] for _ in range(count)]
    Path(job.prompts).write_text(json.dumps(rows), encoding="utf-8")


def cache_directory(given: str | None) -> Path:
    """`--cache`, else `$XDG_CACHE_HOME/asyncrl/bench`, else `~/.cache/asyncrl/bench`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given).expanduser() if given else base / "asyncrl" / "bench").absolute()


_TOPICS = (
    "a lighthouse", "the sea", "an old clock", "winter", "a violin", "bread", "a railway", "the moon",
    "a market", "bees", "a bridge", "rain", "a library", "mountains", "a kite", "tea",
)  # fmt: skip
_READERS = ("a child", "a sailor", "a teacher", "a gardener", "a painter", "a nurse", "a farmer", "a student")
_WISHES = ("Be brief.", "Use simple words.", "Do not explain.", "Answer in one line.")


def write_prompts(path: Path, count: int = 512, seed: int = 0, distinct: int | None = None) -> Path:
    """Chat prompts of nearly equal length; the same rows for the same seed, and from the start again after `distinct`.

    How long the completions of a step are depends much on its prompts. With as many distinct ones as a step has, all steps
    of all sides have the same, whichever of them are measured.
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(distinct or count):
        topic, reader, wish = draw.choice(_TOPICS), draw.choice(_READERS), draw.choice(_WISHES)
        text = f"Please write one or two short sentences about {topic} for {reader}. {wish}"
        rows.append(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")
    path.write_text("".join(rows[i % len(rows)] for i in range(count)), encoding="utf-8")
    return path


LOOPS = ("asyncio", "uvloop")


def new_loop(name: str = "uvloop") -> asyncio.AbstractEventLoop:
    """As of `asyncrl run`; or asyncio's."""
    if name == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    return asyncio.new_event_loop()


@dataclass(frozen=True, slots=True)
class LedgerJob(Job):
    """The ledger over the line. `ranks`: without rank 0. `live`: groups that are in the books all the time."""

    ranks: int
    live: int
    seconds: float
    threads: int = 1
