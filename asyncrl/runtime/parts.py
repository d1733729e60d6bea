"""Where the parts of a rank are built (`Site`), and those in which a real run (`real.py`) and a dry one differ (`Parts`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.config.schema import Config
from asyncrl.data.prompts_files import Rows
from asyncrl.distributed.world import World
from asyncrl.ports import Engine, Trainer, WeightSink
from asyncrl.pumps.pipeline import Round
from asyncrl.rewards.models import TextModel
from asyncrl.telemetry.recorder import Recorder

from .performance import DeviceRates
from .starting import Say

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.trainer import TorchTrainer

    from .gate import Verdict


@dataclass(frozen=True, slots=True)
class Site:
    """Where the parts of a rank are built. `say`: hears what goes on, a stage and its counts, from any thread. `logs`: the folder
    for what workers print. `rows`: prompts that the program brings, in the place of `data.train`; `own_environment`: whether it
    brings one."""

    config: Config
    world: World
    device: torch.device
    recorder: Recorder
    stack: AsyncExitStack  # whatever has to be closed, in the order in which it was opened
    say: Say
    logs: Path | None
    rows: Rows | None = None
    own_environment: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between a real and a dry run."""

    engine: Engine
    trainer: Trainer
    sinks: tuple[WeightSink, ...]
    lanes: tuple[Any, ...]
    tokenizer: Any
    policy: PolicyModel | None = None
    core: TorchTrainer | None = None
    rates: DeviceRates | None = None
    round: Round | None = None
    verdict: Verdict | None = None
    reward_models: Sequence[TextModel] = ()  # in the order of `reward.model`, on the first lane
    placed: str = ""  # for people: where the engine runs, and with how many threads
