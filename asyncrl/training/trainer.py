"""The split train step on one rank: synchronous, called on the lane that owns the device.

    | call     | closed            | open                                        | committed (see below) |
    |----------|-------------------|---------------------------------------------|-----------------------|
    | begin    | opens             | TrainStepError "already open"               | TrainStepError        |
    | micro    | TrainStepError    | accumulates, returns None                   | TrainStepError        |
    | finish   | TrainStepError    | reduces, steps, closes, returns the result  | TrainStepError        |
    | abort    | no-op             | zeroes gradients, closes; weights untouched | closes                |

An exception, BaseException included, leaves the step open with the weights as they were: the caller aborts. A refused
call changes nothing. The commit point is the return of `optimizer.step`: the working copy and the version follow in the
same closure, so a failure after it (in the schedule, say) leaves a step that is *committed*: the weights are the new
version's, and only abort is left.

Order of finish: (1) one float64 all-reduce of the counts and the loss; (2) the denominator N of each term; (3) metrics over
ranks, and the mismatch gate; (4) gradients x 1/N; (5) one reduction of gradients over ranks; (6) device synchronize; (7) clip,
on what is rescaled; (8) optimizer step; (9) version; (10) the learning rate of this step is noted; (11) schedule; (12) closed.

Shape legend: T packed tokens, S scored tokens, B sequences, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import EntropyControl, Loss, LossInputs, LossSums
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import DivergenceError, TrainStepError
from asyncrl.models.copying import to_device
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.types import Float32Array, Microbatch, Normaliser, StepResult

from .accumulators import Counts, Metrics, empty_metrics
from .balance import METRIC, Balance, balance_of
from .optimizer import FlatAdamW, Parameters
from .passes import UNREPLAYED, Forward, loss_inputs, outside_error, routes_of, swapped, unreplayed
from .reducer import OneRank, Reducer
from .schedule import Schedule
from .second_buffer import SecondBuffer
from .survey import survey

_NORM_BLOCK = 4096


class StepState(Enum):
    """Where an open step stands."""

    OPEN = "open"
    # The optimizer moved the weights, and what came after it failed.
    COMMITTED = "committed"


@dataclass(slots=True)
class TrainStep:
    """What is summed up and counted in the step that is open."""

    loss: Loss
    metrics: Metrics
    counts: Counts
    microbatches: int = 0
    zeroed: bool = False  # the gradients of the step before are gone
    # Of each microbatch that ran: loss, whether it holds ids that the model lacks, and itself without its routes.
    ran: list[tuple[Tensor, Tensor, Microbatch]] = field(default_factory=list)
    state: StepState = StepState.OPEN


class TorchTrainer:
    """Owns gradients, optimizer and schedule of a `PolicyModel`. Everything here runs on the policy's lane."""

    is_sharded = False  # whether `state_dict` is this rank's part alone

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainConfig,
        reducer: Reducer | None = None,
        *,
        max_completion_length: int,
        needs_reference: bool = False,
        updates_per_batch: int = 1,
        second_buffer: bool = False,
        mismatch_gate: float | Literal["auto"] | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        """`max_completion_length`: tokens, for the normaliser of that name. `needs_reference` keeps a frozen copy of the
        weights, in the matmul dtype, as they are now. `updates_per_batch`: optimizer steps per batch of `max_steps`.
        `mismatch_gate`: as `algorithm.mismatch_gate`, which `resolve` has made a number or None.
        `second_buffer`: room for the gradient of a term with a normaliser of its own (see second_buffer.py). `parameters`:
        what is trained, where that is not the policy's flat buffer."""
        self.policy = policy
        self.config = config
        assert mismatch_gate != "auto"
        self.mismatch_gate = mismatch_gate
        self.reducer: Reducer = reducer or OneRank()
        self.max_completion_length = max_completion_length
        self.parameters: Parameters = parameters or policy.flat
        self.optimizer = FlatAdamW(self.parameters, config)
        total = None if config.max_steps is None else config.max_steps * updates_per_batch
        self.schedule = Schedule(config, total)
        self.steps_done = 0
        self.optimizer.set_lr(self.schedule.lr(0))
        self.forward = Forward(policy, checkpointing=config.gradient_checkpointing)
        self.balance = Balance.of(policy, config, max_completion_length)
        self.reference: Tensor | None = policy.weights.working.detach().clone() if needs_reference else None
        self.second = SecondBuffer(policy.flat) if second_buffer else None
        # Of the entropy bonus, from the first step on that asks for it.
        self.control: EntropyControl | None = None
        self._saved_control: dict[str, float] = {}
        self._step: TrainStep | None = None
        self._empty: tuple[Loss, dict[str, Normaliser]] | None = None

    @property
    def version(self) -> int:
        """As `Trainer.version`: that of the policy."""
        return self.policy.version

    # -- the four calls ----------------------------------------------------------------------------------------------

    def begin_train_step(self, loss: Loss) -> None:
        """Open a step. Errors: TrainStepError where one is open, and where `loss` has a second normaliser but there is neither
        a survey of the step nor a second gradient buffer."""
        if self._step is not None:
            raise TrainStepError(f"a train step is already open ({self._step.state.value}); finish or abort it first")
        loss = self._controlled(loss)
        if loss.extra_normaliser is not None and self.second is None:
            raise TrainStepError(
                f"the terms of loss {loss.name} are divided by {loss.normaliser.value} and by {loss.extra_normaliser.value}: "
                "survey the whole step first, or build the trainer with a second gradient buffer"
            )
        if self._empty is None or self._empty[0] is not loss:
            names = empty_metrics(loss, self.parameters.master_dtype, self.policy.device)
            balanced = {} if self.balance is None else {METRIC: loss.normaliser}
            routed = {} if self.policy.routing is None else {UNREPLAYED: Normaliser.NONE}
            self._empty = loss, names | balanced | routed
        self._step = TrainStep(loss, Metrics(dict(self._empty[1])), Counts())

    def train_microbatch(self, batch: Microbatch) -> None:
        """Forward and backward; gradients and sums add up. Errors: TrainStepError; whatever the loss raises."""
        step = self._require_open()
        self._count(step, batch)
        # Fully masked sequences are counted, and that is all they do.
        if batch.scored == 0:
            return
        with torch.enable_grad():
            self._run(step, batch)

    def _count(self, step: TrainStep, batch: Microbatch) -> None:
        step.counts.sequences += batch.sequences + batch.skipped_sequences
        step.counts.tokens += batch.scored + batch.skipped_tokens
        step.counts.skipped_sequences += batch.skipped_sequences
        step.counts.skipped_tokens += batch.skipped_tokens
        if batch.routes is not None:
            step.metrics.add(unreplayed(batch.routes))
        step.counts.microbatches += 1
        step.microbatches += 1

    def _run(self, step: TrainStep, batch: Microbatch) -> None:
        """Forward and backward, gradients enabled; the sums of metrics."""
        self._zero_once(step)
        inputs, sums, outside = self._evaluate(step.loss, batch)
        sums.total.backward()
        if sums.extra is not None:
            assert self.second is not None  # begin has seen to it
            _, again, _ = self._evaluate(step.loss, batch)  # backward used up what the layers had kept
            assert again.extra is not None
            with self.second.in_place():
                again.extra.backward()
        step.metrics.add(sums.metrics)
        step.metrics.add_loss(sums.total, sums.extra)
        step.ran.append((sums.total.detach(), outside, replace(batch, routes=None)))
        age_S = self.version - to_device(batch.versions, inputs.logp_S.device).to(torch.int64)
        step.metrics.add_mismatch(
            inputs.logp_S.detach(), inputs.sampler_logp_S, age_S, inputs.sequence_S, batch.sequences
        )

    def _evaluate(self, loss: Loss, batch: Microbatch) -> tuple[LossInputs, LossSums, Tensor]:
        routes = routes_of(batch, self.policy.routing, keep_logits=self.balance is not None)
        logp_S, entropy_S = self.forward(batch, entropy_grad=loss.needs_entropy_grad, routes=routes)
        return *self._sums(loss, loss_inputs(batch, logp_S, entropy_S), batch, routes), self.forward.outside

    def _sums(
        self, loss: Loss, inputs: LossInputs, batch: Microbatch, routes: Routes | None
    ) -> tuple[LossInputs, LossSums]:
        """Those of the loss, and the balance of experts where there is one."""
        if self.balance is None or routes is None:
            return inputs, loss(inputs)
        return inputs, self.balance.added(loss, inputs, balance_of(routes, batch))

    def finish_train_step(self) -> StepResult:
        """Reduce, rescale, clip, step, tick the version, close.

        A step of sequences of which none has a scored token (all of them truncated, with `mask_truncated`) is counted and
        moves no weight: the optimizer would go on its momentum and decay alone.
        Errors: TrainStepError where the step has no sequence at all; DataError for token ids that the model lacks, on every rank
        where one has some; DivergenceError where the loss or the norm of the
        gradient is not finite, or the sampler's log-probs are beyond the gate. All before a weight moves.
        """
        step = self._require_open()
        device = self.policy.device
        totals = self._totals(step)
        denominators = totals.denominators(self.max_completion_length)
        denominator = denominators[step.loss.normaliser]
        by_extra = denominators[step.loss.extra_normaliser or Normaliser.NONE]
        loss = totals.loss / denominator + totals.extra / by_extra
        if not math.isfinite(loss):
            raise _diverged(step, f"the loss of the step after version {self.version} is {loss}")
        measured = totals.measured().denominators(self.max_completion_length)
        metrics = step.metrics.reduce(self.reducer, device, measured)
        self._check_mismatch(metrics.get("mismatch/current_mean"))
        self._zero_once(step)  # no microbatch of this rank had a scored token
        gradient = self.parameters.grad
        gradient.mul_(1.0 / denominator)
        if step.loss.extra_normaliser is not None and self.second is not None:
            self.second.join_(1.0 / by_extra)
        self.parameters.zero_frozen()
        self._reduce_gradients(gradient)
        if device.type == "cuda":
            # The reduction runs on a stream of its own: half a gradient is no gradient.
            torch.cuda.synchronize(device)
        grad_norm = self._clip(gradient)
        if totals.tokens > 0:
            self.optimizer.step()
        step.state = StepState.COMMITTED
        version = self._advance()
        lr = self.optimizer.lr
        self.steps_done += 1
        self.optimizer.set_lr(self.schedule.lr(self.steps_done))
        clipped = float(self.config.grad_clip is not None and grad_norm > self.config.grad_clip)
        metrics.update({"optim/grad_norm": grad_norm, "optim/clipped": clipped, "optim/lr": lr})
        if self.control is not None and totals.tokens > 0:
            metrics["entropy_coef"] = self.control.applied
            self.control = self.control.after(metrics["entropy"])
        self._step = None
        return StepResult(
            version=version,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=round(totals.tokens),
            sequences=round(totals.sequences),
            microbatches=step.microbatches,
            metrics=metrics,
        )

    def abort_train_step(self) -> None:
        """Zero the gradients and close; optimizer, schedule, version and weights stay. With nothing open: nothing."""
        if self._step is None:
            return
        self._zero_grad()
        self._step = None

    def compute_logprobs(self, batch: Microbatch, model: Literal["policy", "reference"] = "policy") -> Float32Array:
        """Log-probs [S] at the batch's temperatures, without gradient. May be called inside a step: it leaves gradients
        alone. `reference`: the weights at the start; ValueError where the trainer keeps none."""
        with torch.no_grad():
            if model == "policy":
                logp_S, _ = self.forward(batch, routes=routes_of(batch, self.policy.routing))
            else:
                # Under other weights: where the sampler sent a token says nothing about them.
                if self.reference is None:
                    raise ValueError(
                        "compute_logprobs: the trainer was built without a reference (needs_reference=True)"
                    )
                with swapped(self.policy, self.reference):
                    logp_S, _ = self.forward(batch)
        return self._on_host(logp_S, batch)

    def compute_entropies(self, batch: Microbatch) -> Float32Array:
        """Entropies [S] of the policy at the batch's temperatures, in nats, without gradient."""
        if batch.scored == 0:
            return np.zeros(0, np.float32)
        with torch.no_grad():
            _, entropy_S = self.forward(batch, routes=routes_of(batch, self.policy.routing))
        return self._on_host(entropy_S, batch)

    def _on_host(self, values_S: Tensor, batch: Microbatch) -> Float32Array:
        """What the newest forward gave. Errors: DataError for token ids that the model lacks."""
        result: Float32Array = values_S.float().cpu().numpy()
        if self.forward.outside:
            raise outside_error([batch], self.policy.head.weight.shape[0])
        return result

    def survey(
        self, loss: Loss, batches: Sequence[Microbatch], entropies: Sequence[Float32Array]
    ) -> tuple[Loss, list[Microbatch]]:
        """Before begin, on every rank: what `loss` has to know of the whole step (survey.py). A collective."""
        loss = self._controlled(loss)
        return survey(loss, batches, entropies, self.reducer, self.policy.device, self.max_completion_length)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`version`, `steps_done`, `masters` and `optimizer` by parameter name, and `reference` where there is one.

        Tensors are views of the live state: write or copy them before the next finish, on the lane. A step that is being
        accumulated moves none of them. Errors: TrainStepError where a committed step was not closed.
        """
        if self._step is not None and self._step.state is StepState.COMMITTED:
            raise TrainStepError("state_dict: a committed step was not closed; abort it first")
        state: dict[str, Any] = {
            "version": self.version,
            "steps_done": self.steps_done,
            "masters": dict(self.parameters.named_masters()),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.control is not None:
            state["entropy_control"] = {"coefficient": self.control.coefficient, "entropy": self.control.entropy}
        if self.reference is not None:
            flat = self.policy.weights
            state["reference"] = {name: flat.view(self.reference, i) for i, name in enumerate(flat.names)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; everything is copied. Errors: TrainStepError while a step is open, KeyError for what is missing."""
        if self._step is not None:
            raise TrainStepError("load_state_dict: a train step is open; finish or abort it first")
        flat = self.policy.weights
        if self.reference is not None:
            if "reference" not in state:
                raise KeyError("the state holds no reference model, but this trainer needs one (kl_coef > 0)")
            for index, name in enumerate(flat.names):
                flat.view(self.reference, index).copy_(state["reference"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.parameters.load_masters(state["masters"])
        self.control, self._saved_control = None, state.get("entropy_control", {})
        self.policy.version = int(state["version"])
        self.steps_done = int(state["steps_done"])
        self.optimizer.set_lr(self.schedule.lr(self.steps_done))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model in Hugging Face format: weights in the matmul dtype (float32 masters are part of the state)."""
        self.policy.save_pretrained(directory)

    # -- parts of finish ---------------------------------------------------------------------------------------------

    def _require_open(self) -> TrainStep:
        if self._step is None:
            raise TrainStepError("no train step open; begin_train_step must be called first")
        if self._step.state is StepState.COMMITTED:
            raise TrainStepError(
                f"the open train step was applied (version {self.version}), but failed afterwards; abort_train_step closes it"
            )
        return self._step

    def _controlled(self, loss: Loss) -> Loss:
        """The loss with this step's coefficient of the entropy bonus, where that is controlled. After a resume the
        coefficient is the saved one, target and step size are those of the configuration."""
        if loss.control is None:
            return loss
        if self.control is None:
            self.control = replace(loss.control, **self._saved_control)
        return loss.at(self.control)

    def _totals(self, step: TrainStep) -> Counts:
        """Of all ranks. Errors: TrainStepError, DataError."""
        step.counts.loss, step.counts.extra = step.metrics.loss_sums()
        step.counts.outside = float(sum(outside for _, outside, _ in step.ran))
        totals = step.counts.over_ranks(self.reducer, self.policy.device)
        if totals.sequences == 0:
            raise TrainStepError(
                "this step has no sequence on any rank: the optimizer would move the weights on momentum and decay alone; "
                "abort the step"
            )
        if totals.outside:
            spoiled = [batch for _, outside, batch in step.ran if outside]
            raise outside_error(spoiled, self.policy.head.weight.shape[0])
        return totals

    def _zero_once(self, step: TrainStep) -> None:
        """Before the first gradient is added, not in begin: publishing the weights of the step before queues behind that."""
        if not step.zeroed:
            self._zero_grad()
            step.zeroed = True

    def _zero_grad(self) -> None:
        self.parameters.zero_grad()
        if self.second is not None:
            self.second.zero_()

    def _check_mismatch(self, mismatch: float | None) -> None:
        gate = self.mismatch_gate
        if gate is not None and mismatch is not None and mismatch > gate:
            raise DivergenceError(
                f"the step after version {self.version} is not applied: trainer and sampler log-probs of that version differ by "
                f"{mismatch:.2g} nats on average; algorithm.mismatch_gate allows {gate}. The weights that sampled are not the "
                "weights that are trained (null where another program's sampler is meant to differ)"
            )

    def _clip(self, gradient: Tensor) -> float:
        """Scale the gradient down to `grad_clip` where it is longer; its norm before. Errors: DivergenceError."""
        norm = self._norm(gradient)
        if not math.isfinite(norm):
            raise DivergenceError(
                f"the gradient of the step after version {self.version} has norm {norm}; the weights are untouched"
            )
        limit = self.config.grad_clip
        if limit is not None and norm > limit:
            gradient.mul_(limit / norm)
        return norm

    # What another layout of parameters does in its own way (sharded.py):

    def _reduce_gradients(self, gradient: Tensor) -> None:
        self.reducer.reduce_gradients_(gradient)

    def _norm(self, gradient: Tensor) -> float:
        return local_norm(gradient)

    def _advance(self) -> int:
        return self.policy.advance()


def _diverged(step: TrainStep, what: str) -> DivergenceError:
    """With the groups of the microbatches whose loss is not finite."""
    bad = [batch for total, _, batch in step.ran if not math.isfinite(float(total))]
    error = DivergenceError(f"{what}; the weights are untouched")
    error.groups = tuple(dict.fromkeys(group for batch in bad for group in batch.group_ids.tolist()))
    return error


def local_norm(vector: Tensor) -> float:
    """Euclidean norm: of blocks in the vector's own dtype, over blocks in float64 (a float64 copy costs seconds)."""
    whole = vector.numel() // _NORM_BLOCK * _NORM_BLOCK
    parts = [torch.linalg.vector_norm(vector[:whole].view(-1, _NORM_BLOCK), dim=1)] if whole else []
    parts.append(torch.linalg.vector_norm(vector[whole:]).view(1))
    return math.sqrt(sum(float(part.cpu().double().square().sum()) for part in parts))
