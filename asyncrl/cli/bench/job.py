"""The task of one run as data, and what both sides share: the model directory, the prompts, the reward.

Everything made here is made once and kept in the cache directory; both sides read the same files.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

PEERS = Path(__file__).parent / "peers"
REWARD = PEERS / "letter_reward.py"
REWARD_FUNCTION = "vowel_share"
MODELS = ("smollm2", "tiny")
Dtype = Literal["float32", "bfloat16"]
Lengths = Literal["natural", "fixed"]


class BenchError(Exception):
    """A side could not be measured; the message says which, and where its log is."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """Whole RL steps of one side. Written as JSON: the peers' scripts read the same keys."""

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
    microbatch: int = 16  # TRL's side: sequences of one forward and backward

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    @classmethod
    def read(cls, path: Path) -> StepJob:
        values = json.loads(path.read_text())
        return cls(**{**values, "overrides": tuple(values["overrides"])})

    def of(self, **changes: object) -> StepJob:
        return replace(self, **changes)  # type: ignore[arg-type]


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


def write_prompts(path: Path, count: int = 512, seed: int = 0) -> Path:
    """Chat prompts of nearly equal length; the same rows for the same seed. 512 cover every run without a repetition."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            topic, reader, wish = draw.choice(_TOPICS), draw.choice(_READERS), draw.choice(_WISHES)
            text = f"Please write one or two short sentences about {topic} for {reader}. {wish}"
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")
    return path
