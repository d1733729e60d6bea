"""The gate chooses the path on which a run computes its model: the first path that agrees with eager transformers.

    probe       a few layers of the same class with the model's own weights (models/probe.py)
    comparison  training log-probs, gradients and the log-probs of our sampler, against transformers' eager model (gate_trial.py)
    paths       fused, packed, plain (models/paths.py), fastest first; a path that disagrees, or fails, is not used

If no path agrees, the model is refused with all differences. The comparison is in float32, where rounding is far below the bounds.
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
from asyncrl.models.attention.context import require_context
from asyncrl.models.parameters.frozen import describe_frozen, frozen_names, mark_unreached
from asyncrl.models.parameters.lora import describe_adapted
from asyncrl.models.paths import PACKED, PATHS, ModelPath
from asyncrl.models.policy import refuse_unsupported
from asyncrl.models.probe import WIDTHS, build_probe, position_limit
from asyncrl.models.rotary import describe, is_past_context, length_dependent_message

from .gate_trial import NATS, RELATIVE, Distance, Trial

# If the relative error of a matrix product is larger, the device does not compute in float32.
_MAX_PRODUCT_ERROR = 1e-5


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one path: its distance from the eager model, or the reason why the path cannot compute the model."""

    path: ModelPath
    distance: Distance | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the path agrees with the eager model within the bounds."""
        return self.distance is not None and self.distance.agrees

    def __str__(self) -> str:
        if self.distance is None:
            return f"{self.path}: {self.reason}"
        parameter = "" if self.distance.gradients <= RELATIVE else f" ({self.distance.parameter})"
        return f"{self.path}: {self.distance}{parameter}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of all compared paths."""

    name: str  # of the model's class
    probe_layers: int
    model_layers: int
    results: tuple[Result, ...]
    seconds: float
    # A sentence on the rotary frequencies. Empty if no frequencies depend on the length of the rows.
    rotary: str = ""
    notes: tuple[str, ...] = ()  # sentences on frozen weights, or weights without adapters

    @property
    def chosen(self) -> Result | None:
        """The result of the first path that agrees, or None."""
        return next((result for result in self.results if result.agrees), None)

    @property
    def path(self) -> ModelPath:
        """The first path that agrees. Errors: ConfigError if no path agrees."""
        if self.chosen is None:
            differences = "\n".join(f"  {result}" for result in self.results)
            raise ConfigError(
                f"model.path: {self.name} is refused: this runtime computes something else than the model itself. Log-probs "
                f"must agree within {NATS:g} nats and gradients within {RELATIVE:g}. Differences from the model's own eager "
                f"forward and backward ({self._extent()}):\n{differences}"
            )
        return self.chosen.path

    def lines(self) -> list[str]:
        """Sentences for the start of a run."""
        chosen = self.chosen
        if chosen is None or chosen.distance is None:
            return [f"model: {self.name}, refused", *(f"  {result}" for result in self.results)]
        path = chosen.path
        lines = [
            f"model: {self.name} on the {path.name} path; against its eager pass {chosen.distance}, {self._extent()}"
        ]
        if self.rotary:
            lines.append(self.rotary)
        lines += self.notes
        if path.name == "plain":
            lines.append("note: the plain path computes a prompt once per member, and rebuilds caches after an update")
        if not path.cached:
            lines.append("note: sampling with the model's cache is wrong, so each token costs a forward over its row")
        return lines + [f"note: not used: {result}" for result in self.results[: self.results.index(chosen)]]

    def _extent(self) -> str:
        return f"{self.probe_layers} of {self.model_layers} layers, float32"


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
    all_paths: bool = False,
    show: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare paths on `device` until a path agrees, or all paths if `all_paths` is set.

    `module`: the model as it was loaded. If it is on the meta device, the probe has random weights. `dtype`, `lora`,
    `checkpointing`: settings of the run; the plain path must run in `dtype`, too. `longest`: tokens of the run's longest row; None:
    no row exceeds the original context (`rotary.original_context`). `sharded`: if the layers are sharded over the ranks, the packed
    path must agree, and plain is excluded. `paths`: in the order of comparison. `show`: gets a sentence before each comparison.
    Errors: ConfigError if no small copy can be built, or the model itself fails, is not causal, or has too few positions.
    """
    started = time.perf_counter()
    name = type(module).__name__
    refuse_unsupported(module)
    with _conditions(torch.device(device)):
        try:
            show("checking the model: its own eager pass")
            long_rows = longest is not None and is_past_context(module.config, longest)
            trial = _trial(module, device, long_rows=long_rows, lora=lora, checkpointing=checkpointing, dtype=dtype)
            layers = f"{_layers(trial.probe)} of {_layers(module)} layers"
            trial.check_causal()
            if longest is not None and not trial.has_fixed_frequencies():
                raise ConfigError(length_dependent_message(module.config, longest))
            if longest is not None and (end := _positions_end(module, longest)) is not None:
                raise ConfigError(
                    f"it has positions for {end} tokens, and rows may have {longest}; make rollout.max_context at most {end} (if "
                    "it is not set: the sum of data.max_prompt_tokens and rollout.max_tokens)"
                )
        except ConfigError as error:
            raise ConfigError(f"model.path: {name} is refused: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"model.path: {name} is refused: no path can be compared with the model, because a small copy of the model fails "
                f"in transformers ({first_line(error)})"
            ) from error
        results: list[Result] = []
        if sharded:
            paths = [path for path in paths if path.name != "plain"]
            packed = _compare(trial, PACKED)
            if not packed.agrees:
                paths, results = [], [packed]
        for number, path in enumerate(paths, 1):
            show(f"checking the model: path {number} of {len(paths)} ({path.name}), {layers}")
            results.append(_compare(trial, path))
            if results[-1].agrees and not all_paths:
                break
    mark_unreached(module, trial.families_without_gradient)
    notes = describe_adapted(module, lora) if lora and lora.rank else describe_frozen(module, frozen_names(module))
    seconds, rotary = time.perf_counter() - started, describe(module.config, longest)
    return Verdict(name, _layers(trial.probe), _layers(module), tuple(results), seconds, rotary, tuple(notes))


def _trial(module: PreTrainedModel, device: torch.device | str, *, long_rows: bool, **options: Any) -> Trial:
    """A trial of narrow layers (fewer heads and units), or of full layers if the class cannot be built with narrow layers."""
    for width in WIDTHS:
        try:
            probe = build_probe(module, device, width=width, long_rows=long_rows)
            _require_same_parts(module, probe)
            return Trial(probe, long_rows=long_rows, **options)  # raises if the class cannot compute this width
        except Exception:
            if width == WIDTHS[-1]:
                raise
    raise AssertionError("the last width returns or raises")


def _require_same_parts(module: PreTrainedModel, probe: PreTrainedModel) -> None:
    """Errors: ConfigError if parts of the model were replaced after its class built them: the probe has the original parts."""
    classes = {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in module.named_modules()}
    for name, part in probe.named_modules():
        expected = f"{type(part).__module__}.{type(part).__qualname__}"
        found = classes.get(name, expected)
        if found != expected:
            raise ConfigError(
                f"its {name} is a {found}, but its class builds a {expected}, so a comparison would prove nothing; merge "
                "adapters into their weights first"
            )


def _positions_end(module: PreTrainedModel, longest: int) -> int | None:
    """The most tokens that a row may have. None if the model can run rows of `longest` tokens, or if no probe can be built."""
    for width in WIDTHS:
        with contextlib.suppress(Exception):  # the class may raise anything
            return position_limit(module, longest, width=width)
    return None


def check_run_model(
    config: Config,
    module: PreTrainedModel,
    device: torch.device | str = "cpu",
    show: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """`check_model` with the settings of a run. Errors: ConfigError, also if no path agrees or a setting excludes the path."""
    verdict = check_model(
        module,
        device,
        config.model.dtype,
        longest=row_limit(config),
        lora=config.model.lora,
        checkpointing=config.train.gradient_checkpointing,
        sharded=config.distributed.sharding == "fsdp",
        show=show,
    )
    require_context(module.config, verdict.path, config.distributed.context)
    if verdict.path.name == "plain" and config.engine.kv_after_update == "keep":
        raise ConfigError(
            f"engine.kv_after_update is keep, and {verdict.name} runs on the plain path, which rebuilds all caches after an "
            "update; set engine.kv_after_update to recompute, or leave the setting out"
        )
    return verdict


def _compare(trial: Trial, path: ModelPath) -> Result:
    try:
        return Result(path, trial.run(path))
    except ConfigError as error:
        return Result(path, None, str(error).removeprefix("model.path: "))
    except Exception as error:  # the model's code may raise anything
        return Result(path, None, first_line(error))


def _layers(module: PreTrainedModel) -> int:
    return int(module.config.get_text_config().num_hidden_layers)


@contextlib.contextmanager
def _conditions(device: torch.device) -> Iterator[None]:
    """Inside the block torch uses one thread and no TF32, and warnings about the probe are hidden, such as those about kernels that
    are not installed. Errors: ConfigError if the device rounds products to TF32 in spite of this: then no path would agree."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    disabled = logging.root.manager.disable
    # A probe is so small that several threads would mostly wait for each other, for seconds on a busy machine.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    logging.disable(logging.WARNING)
    try:
        matrix = torch.linspace(0.5, 1.5, 64 * 64, device=device).sin().view(64, 64)
        exact = matrix.double() @ matrix.double()
        # Relative to the largest entry: about 1e-7, or 5e-4 if rounded to TF32 (10 bits).
        error = float((matrix @ matrix - exact).abs().max() / exact.abs().max())
        if error > _MAX_PRODUCT_ERROR:
            override = os.environ.get("NVIDIA_TF32_OVERRIDE", "not set")
            raise ConfigError(
                f"float32 products on {device} differ by {error:.0e} from float64, which is the rounding of TF32, but models "
                f"are compared in float32; unset NVIDIA_TF32_OVERRIDE (now {override})"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        logging.disable(disabled)
