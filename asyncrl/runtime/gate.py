"""The gate: no model trains before it was compared with itself, untouched, and it is run in the first way that agrees.

    probe       a few layers of the same class with the model's own weights (models/probe.py)
    comparison  training log-probs, gradients and the cached sampler against transformers' eager model (gate_trial.py)
    paths       fused, packed, plain (models/paths.py), fastest first; a path that disagrees, or fails, is not used

Where none agrees the model is refused with what was compared and by how much. All in float32: rounding of the run's dtype
is not what is asked here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.config.resolve import row_limit
from asyncrl.config.schema import Config, LoraConfig
from asyncrl.errors import ConfigError, first_line
from asyncrl.models.parameters.frozen import describe_frozen, frozen_names, mark_unreached
from asyncrl.models.parameters.lora import describe_adapted
from asyncrl.models.paths import PACKED, PATHS, ModelPath
from asyncrl.models.policy import refuse_unsupported
from asyncrl.models.probe import WIDTHS, build_probe, positions_end
from asyncrl.models.rotary import describe, not_held, outgrows

from .gate_trial import NATS, RELATIVE, Distance, Trial

_ROUNDED = 1e-5  # more than this far from float64 is no float32 product


@dataclass(frozen=True, slots=True)
class Result:
    """Of one path: how far it is from the eager model, or why it does not take the model."""

    path: ModelPath
    distance: Distance | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the path computes what the model does, within the bounds."""
        return self.distance is not None and self.distance.agrees

    def __str__(self) -> str:
        if self.distance is None:
            return f"{self.path}: {self.reason}"
        where = "" if self.distance.gradients <= RELATIVE else f" ({self.distance.parameter})"
        return f"{self.path}: {self.distance}{where}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and what came of it. `layers` of the model's `total` were."""

    name: str
    layers: int
    total: int
    results: tuple[Result, ...]
    seconds: float
    # A line on the frequencies that were chosen, where the model has several.
    rotary: str = ""
    notes: tuple[str, ...] = ()  # on what is not trained

    @property
    def chosen(self) -> Result | None:
        """The first path that agrees."""
        return next((result for result in self.results if result.agrees), None)

    @property
    def path(self) -> ModelPath:
        """Errors: ConfigError where no path agrees."""
        if self.chosen is None:
            raise ConfigError(
                f"model.path: {self.name} is refused: this runtime computes something else than the model itself. Compared "
                f"with its own eager forward and backward, {self._compared()}, where log-probs must agree within {NATS:g} nats "
                f"and gradients within {RELATIVE:g}:\n{self._listed()}"
            )
        return self.chosen.path

    def lines(self) -> list[str]:
        """For a run's first lines."""
        chosen = self.chosen
        if chosen is None or chosen.distance is None:
            return [f"model: {self.name}, refused", *(f"  {result}" for result in self.results)]
        found = [
            f"model: {self.name} on the {chosen.path.name} path; {chosen.distance} from itself, {self._compared()}"
        ]
        if self.rotary:
            found.append(self.rotary)
        found += self.notes
        if chosen.path.name == "plain":
            found.append(
                "note: on the plain path nothing is shared in a group, and all caches are rebuilt after an update"
            )
        if not chosen.path.cached:
            found.append(
                "note: sampled without a cache, which is wrong here: each token costs a forward over its whole row"
            )
        return found + [f"note: not {result}" for result in self.results[: self.results.index(chosen)]]

    def _compared(self) -> str:
        return f"{self.layers} of {self.total} layers, float32"

    def _listed(self) -> str:
        return "\n".join(f"  {result}" for result in self.results)


def check_model(
    module: PreTrainedModel,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    *,
    longest: int | None = None,
    lora: LoraConfig | None = None,
    checkpointing: bool = False,
    sharded: bool = False,
    paths: Sequence[ModelPath] = PATHS,
    every: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare on `device`. `module`: as loaded, or on the meta device, where the weights are random. `longest`: tokens of the
    longest row that the run can have; None: its rows stay within the original context. `dtype`: in which a path that agrees in
    float32 must run at all, where it is transformers' own.

    `sharded`: trained by transformers' own layers cut over the ranks, which is the packed path; the plain one is not. `every`:
    go on after the first path that agrees. `say` hears what is compared. Errors: ConfigError where the model cannot be built
    small, or fails by itself.
    """
    started = time.perf_counter()
    name = type(module).__name__
    refuse_unsupported(module)
    with _quiet(), _one_thread(), _whole_float32(torch.device(device)):
        try:
            say("checking the model: its own eager pass")
            outgrown = longest is not None and outgrows(module.config, longest)
            trial = _trial(module, device, outgrown=outgrown, lora=lora, checkpointing=checkpointing, dtype=dtype)
            layers = f"{_layers(trial.probe)} of {_layers(module)} layers"
            trial.check_causal()
            if longest is not None and not trial.holds():
                raise ConfigError(not_held(module.config, longest))
            if longest is not None and (end := _positions_end(module, longest)) is not None:
                raise ConfigError(
                    f"it has positions for {end} tokens, and rows may have {longest}; make data.max_prompt_tokens or "
                    "rollout.max_tokens smaller, so that their sum is within that"
                )
        except ConfigError as error:
            raise ConfigError(f"model.path: {name} is refused: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"model.path: {name} is refused: it cannot be compared with itself, because a small copy of it fails in "
                f"transformers ({first_line(error)})"
            ) from error
        results: list[Result] = []
        if sharded:
            paths = [path for path in paths if path.name != "plain"]
            packed = _compare(trial, PACKED, sampler=False)
            if not packed.agrees:
                return _verdict(module, trial, [packed], started, longest, [])
        for number, path in enumerate(paths, 1):
            say(f"checking the model: path {number} of {len(paths)} ({path.name}), {layers}")
            results.append(_compare(trial, path))
            if results[-1].agrees and not every:
                break
        mark_unreached(module, trial.unreached)
    return _verdict(module, trial, results, started, longest, _untrained(module, lora))


def _untrained(module: PreTrainedModel, lora: LoraConfig | None) -> list[str]:
    """Lines for people. Adapters lie beside weights that are frozen anyhow."""
    if lora is not None and lora.rank:
        return describe_adapted(module, lora)
    return describe_frozen(module, frozen_names(module))


def _trial(module: PreTrainedModel, device: torch.device | str, *, outgrown: bool, **given: Any) -> Trial:
    """On narrow layers, or on whole ones where the class cannot be built narrow."""
    for width in WIDTHS:
        try:
            probe = build_probe(module, device, width=width, outgrown=outgrown)
            _require_own_parts(module, probe)
            trial = Trial(probe, outgrown=outgrown, **given)
            trial.eager(alone=False)
            return trial
        except Exception:
            if width == WIDTHS[-1]:
                raise
    raise AssertionError("whole layers return or raise")


def _require_own_parts(module: PreTrainedModel, probe: PreTrainedModel) -> None:
    """What is compared was built by the class. Errors: ConfigError for a model into which somebody has put other parts since."""
    own = dict(module.named_modules())
    for name, part in probe.named_modules():
        found, built = (f"{type(each).__module__}.{type(each).__qualname__}" for each in (own.get(name, part), part))
        if found != built:
            raise ConfigError(
                f"its {name} is a {found}, where its class builds a {built}, and that is what would be compared; merge adapters "
                "into their weights first"
            )


def _positions_end(module: PreTrainedModel, longest: int) -> int | None:
    """As `positions_end`, of narrow layers, or of whole ones; None as well where neither can be asked."""
    for width in WIDTHS:
        with contextlib.suppress(Exception):  # whatever the class raises where it cannot be built so
            return positions_end(module, longest, width=width)
    return None


def check_for(
    config: Config,
    module: PreTrainedModel,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """What the run of `config` needs, asked of `module`. Errors: ConfigError for settings that the path does not serve."""
    verdict = check_model(
        module,
        device,
        config.model.dtype,
        longest=row_limit(config),
        lora=config.model.lora,
        checkpointing=config.train.gradient_checkpointing,
        sharded=config.distributed.sharding == "fsdp",
        say=say,
    )
    if verdict.path.name == "plain" and config.engine.kv_after_update == "keep":
        raise ConfigError(
            f"engine.kv_after_update is keep, and {verdict.name} runs on the plain path, which rebuilds all caches after an "
            "update; set it to recompute, or leave it out"
        )
    return verdict


def _compare(trial: Trial, path: ModelPath, sampler: bool = True) -> Result:
    try:
        return Result(path, trial.run(path, sampler=sampler))
    except ConfigError as error:
        return Result(path, None, str(error).removeprefix("model.path: "))
    except Exception as error:  # whatever a model's code raises when it is run so
        return Result(path, None, first_line(error))


def _verdict(
    module: PreTrainedModel, trial: Trial, results: list[Result], started: float, longest: int | None, notes: list[str]
) -> Verdict:
    return Verdict(
        name=type(module).__name__,
        layers=_layers(trial.probe),
        total=_layers(module),
        results=tuple(results),
        seconds=time.perf_counter() - started,
        rotary=describe(module.config, longest),
        notes=tuple(notes),
    )


def _layers(module: PreTrainedModel) -> int:
    return int(module.config.get_text_config().num_hidden_layers)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A probe is too small to be shared: threads would wait for each other longer than they compute, on a busy machine
    for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _whole_float32(device: torch.device) -> Iterator[None]:
    """torch's own switch for TF32 is off for the comparison. Errors: ConfigError where products are rounded all the same: every
    model would be refused, for what is not its doing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        if (found := _product_error(device)) > _ROUNDED:
            raise ConfigError(
                f"float32 products on {device} are {found:.0e} from float64, which is the rounding of TF32: unset "
                f"NVIDIA_TF32_OVERRIDE (it is {os.environ.get('NVIDIA_TF32_OVERRIDE', 'not set')}); models are compared in float32"
            )
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_error(device: torch.device) -> float:
    """Of a float32 product, over the largest entry: some 1e-7; in TF32, with 10 bits, some 5e-4."""
    sides = [torch.linspace(0.5, 1.5, 64 * 64, device=device).sin().view(64, 64) for _ in range(2)]
    exact = sides[0].double() @ sides[1].double()
    return float(((sides[0] @ sides[1]) - exact).abs().max() / exact.abs().max())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' advice about a few layers of a model, most of it about kernels that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        previous = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
