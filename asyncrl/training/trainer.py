"""The train step of one rank, in four calls. All calls are synchronous and must run on the thread that owns the device.

    | call     | no step open      | step open                                   | committed (see below) |
    |----------|-------------------|---------------------------------------------|-----------------------|
    | begin    | opens             | TrainStepError "already open"               | TrainStepError        |
    | micro    | TrainStepError    | adds gradients, returns None                | TrainStepError        |
    | finish   | TrainStepError    | reduces, steps, closes, returns the result  | TrainStepError        |
    | abort    | no-op             | zeros gradients, closes; weights unchanged  | closes                |

A TrainStepError changes nothing. The commit point of a step is the return of `optimizer.step`. If a call raises another error
before that point, even a BaseException, the step stays open with unchanged weights, and the caller must abort the step. If finish
raises after that point, the step is *committed*: the weights have changed, and only abort succeeds.

Order of finish: (1) one float64 all-reduce of the counts and the loss; (2) the denominator N of each term; (3) metrics over
ranks, and the mismatch gate; (4) gradients x 1/N; (5) one reduction of gradients over ranks; (6) device synchronize; (7) clip the
rescaled gradients; (8) optimizer step; (9) new version; (10) set the learning rate of the next step; (11) close.

Shape legend: S scored tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import EntropyControl, Loss, LossInputs, LossSums
from asyncrl.algorithms.terms import entropy_threshold
from asyncrl.config.schema import TrainConfig
from asyncrl.distributed.collectives import Collectives
from asyncrl.errors import DivergenceError, TrainStepError
from asyncrl.models.attention.context import require_context
from asyncrl.models.copying import to_device
from asyncrl.models.parameters.flat import copy_named
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.types import Float32Array, Microbatch, Normaliser, StepResult

from .accumulators import Counts, Metrics, empty_metrics
from .agreement import COMPARE_EVERY, bit_sums, exact_halves, require_same_weights
from .balance import BALANCE_METRIC, Balance, balance_of
from .context import Share
from .optimizer import FlatAdamW, Parameters, Schedule, require_names
from .passes import UNREPLAYED, PolicyForward, forward_routes, loss_inputs, replay_gaps, unknown_id_error, using_weights

_NORM_BLOCK = 4096


@dataclass(slots=True)
class TrainStep:
    """Sums and counts of the open step on this rank."""

    loss: Loss
    metrics: Metrics
    counts: Counts
    microbatches: int = 0
    zeroed: bool = False  # whether the previous step's gradients are zeroed
    # For each microbatch that ran: its loss, whether it has ids that the model lacks, and the microbatch without its routes.
    results: list[tuple[Tensor, Tensor, Microbatch]] = field(default_factory=list)
    committed: bool = False  # the optimizer has changed the weights


class TorchTrainer:
    """Owns the gradients, optimizer and schedule of a `PolicyModel`. All methods must run on the device's thread."""

    is_sharded = False  # whether `state_dict` has only this rank's rows
    shards = 1  # number of ranks that together hold one copy of the masters

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainConfig,
        world: Collectives | None = None,
        *,
        max_completion_length: int,
        needs_reference: bool = False,
        total_steps: int | None = None,
        mismatch_gate: float | None = None,
        parameters: Parameters | None = None,
        siblings: Collectives | None = None,
    ) -> None:
        """world: the ranks that train; None: this rank alone. max_completion_length: tokens, for
        `Normaliser.SEQUENCES_X_MAX_LENGTH`. needs_reference: keep a copy of the present weights as reference model. total_steps:
        optimizer steps of the run, for the schedule; by default `train.max_steps`. mismatch_gate: limit of the mean of |trainer -
        sampler log-prob| in nats; None: no limit. parameters: the trained parameters; by default the policy's `flat`.
        siblings: the ranks that share each microbatch (context.py), this rank included; all make the same calls, with the same
        arguments, in the same order. Errors: ConfigError, also if siblings cannot share the microbatches of this model."""
        self.policy = policy
        self.config = config
        self.mismatch_gate = mismatch_gate
        self.world: Collectives = world or Collectives()
        self.max_completion_length = max_completion_length
        self.parameters: Parameters = parameters or policy.flat
        self.optimizer = FlatAdamW(self.parameters, config)
        self.schedule = Schedule(config, total_steps or config.max_steps)
        self.steps_done = 0
        self.optimizer.set_lr(self.schedule.lr(0))
        self.siblings = siblings
        # Siblings have the same counts and metrics, so only the leader adds them to the step.
        self._leads = siblings is None or siblings.rank == 0
        if siblings is not None:
            require_context(policy.config, policy.path, siblings.world_size)
        self.forward = PolicyForward(policy, checkpointing=config.gradient_checkpointing, siblings=siblings)
        self.balance = Balance.of(policy, config, max_completion_length)
        self.reference: Tensor | None = policy.weights.working.detach().clone() if needs_reference else None
        # Controls the coefficient of the entropy bonus. None before the first loss with a `control`.
        self.control: EntropyControl | None = None
        self._saved_control: dict[str, float] = {}  # from a checkpoint
        self._step: TrainStep | None = None
        self._compare_at = 0  # steps_done at which ranks compare their weights next

    @property
    def version(self) -> int:
        """The policy version: the number of applied train steps of the run, including steps without scored tokens."""
        return self.policy.version

    # -- the four calls ----------------------------------------------------------------------------------------------

    def begin_train_step(self, loss: Loss) -> None:
        """Opens a step. Errors: TrainStepError if a step is open, or if `survey` must first prepare the loss."""
        if self._step is not None:
            raise TrainStepError("a train step is already open; finish or abort it first")
        loss = self._with_entropy_control(loss)
        if loss.bonus_needs_scale:
            raise TrainStepError(
                f"loss {loss.name} and its entropy bonus are divided by different numbers: survey the whole step first"
            )
        normalisers = empty_metrics(loss, self.parameters.master_dtype, self.policy.device)
        if self.balance is not None:
            normalisers[BALANCE_METRIC] = loss.normaliser
        if self.policy.routing is not None:
            normalisers[UNREPLAYED] = Normaliser.NONE
        self._step = TrainStep(loss, Metrics(normalisers), Counts())

    def train_microbatch(self, batch: Microbatch) -> None:
        """Adds a forward and backward to the open step. Errors: TrainStepError if no step is open; errors of the loss."""
        step = self._require_open()
        self._count(step, batch)
        # Only masked sequences or skipped groups: `_count` has counted them for the denominators, and they have no gradient.
        if batch.scored == 0:
            return
        with torch.enable_grad():
            self._run(step, batch)

    def _count(self, step: TrainStep, batch: Microbatch) -> None:
        step.microbatches += 1
        if not self._leads:
            return
        step.counts.sequences += batch.sequences + batch.skipped_sequences
        step.counts.tokens += batch.scored + batch.skipped_tokens
        step.counts.skipped_sequences += batch.skipped_sequences
        step.counts.skipped_tokens += batch.skipped_tokens
        if batch.routes is not None:
            step.metrics.add(replay_gaps(batch.routes))
        step.counts.microbatches += 1

    def _run(self, step: TrainStep, batch: Microbatch) -> None:
        """Runs forward and backward, and adds the metrics. The caller must enable gradients (`torch.enable_grad`)."""
        self._zero_once(step)
        inputs, sums, unknown_ids = self._evaluate(step.loss, batch)
        sums.total.backward()
        step.results.append((sums.total.detach(), unknown_ids, replace(batch, routes=None)))
        if not self._leads:
            return
        step.metrics.add(sums.metrics)
        step.metrics.add_loss(sums.total)
        age_S = self.version - to_device(batch.versions, inputs.logp_S.device).to(torch.int64)
        step.metrics.add_mismatch(
            inputs.logp_S.detach(), inputs.sampler_logp_S, age_S, inputs.sequence_S, batch.sequences
        )

    def _evaluate(self, loss: Loss, batch: Microbatch) -> tuple[LossInputs, LossSums, Tensor]:
        routes = forward_routes(batch, self.policy.routing, self.siblings, keep_logits=self.balance is not None)
        logp_S, entropy_S = self.forward(batch, entropy_grad=loss.needs_entropy_grad, routes=routes)
        return *self._sums(loss, loss_inputs(batch, logp_S, entropy_S), batch, routes), self.forward.has_unknown_ids

    def _sums(
        self, loss: Loss, inputs: LossInputs, batch: Microbatch, routes: Routes | None
    ) -> tuple[LossInputs, LossSums]:
        """The inputs and sums of the loss. The sums include the auxiliary loss that balances experts (balance.py), if any."""
        if self.balance is None or routes is None:
            return inputs, loss(inputs)
        share = Share(batch, self.siblings)
        routes.logits = {layer: share.gather_tokens(logits) for layer, logits in sorted(routes.logits.items())}
        return inputs, self.balance.sums_with_balance(loss, inputs, balance_of(routes, batch))

    def finish_train_step(self) -> StepResult:
        """Applies the step and closes it. The module docstring has the order of the work.

        A step without a scored token (all sequences truncated, with `algorithm.mask.truncated`) makes a new version with unchanged
        weights: an optimizer step would only apply momentum and weight decay.
        Errors, all before a weight changes: TrainStepError if the step has no sequence. DataError on every rank if one rank has ids
        that the model lacks. DivergenceError if loss or gradient norm is not finite, if `mismatch_gate` is exceeded, or if the
        weights of ranks differ (agreement.py).
        """
        step = self._require_open()
        device = self.policy.device
        totals = self._totals(step)
        denominators = totals.denominators(self.max_completion_length)
        denominator = denominators[step.loss.normaliser]
        loss = totals.loss / denominator
        if not math.isfinite(loss):
            raise _divergence(step, f"the loss of the step after version {self.version} is {loss}")
        measured = totals.without_skipped().denominators(self.max_completion_length)
        metrics = self._reduce_metrics(step, measured)
        self._check_mismatch(metrics.get("mismatch/current_mean"))
        # Without this call, a rank whose microbatches had no scored token would add the gradients of the previous step.
        self._zero_once(step)
        gradient = self.parameters.grad
        gradient.mul_(1.0 / denominator)
        self.parameters.zero_frozen()
        self._reduce_gradients(gradient)
        if device.type == "cuda":
            # The reduction runs on another CUDA stream, and must end before the gradient is read.
            torch.cuda.synchronize(device)
        grad_norm = self._clip(gradient)
        if totals.tokens > 0:
            self.optimizer.step()
        step.committed = True
        version = self._advance()
        lr = self.optimizer.lr
        self.steps_done += 1
        self.optimizer.set_lr(self.schedule.lr(self.steps_done))
        clipped = float(self.config.grad_clip is not None and grad_norm > self.config.grad_clip)
        metrics.update({"optim/grad_norm": grad_norm, "optim/clipped": clipped, "optim/lr": lr})
        if self.control is not None and totals.tokens > 0:
            metrics["entropy_coef"] = self.control.next_coefficient
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
        """Zeros the gradients and closes the step; does nothing without a step. Keeps weights, optimizer and version."""
        if self._step is None:
            return
        self.parameters.zero_grad()
        self._step = None

    def compute_logprobs(self, batch: Microbatch, model: Literal["policy", "reference"] = "policy") -> Float32Array:
        """Log-probs [S] at the temperatures of `batch`, without gradient. A step may be open. "reference": with the
        weights from the start of the run. Errors: ValueError without a reference model; DataError for ids that the model lacks."""
        with torch.no_grad():
            if model == "policy":
                logp_S, _ = self.forward(batch, routes=forward_routes(batch, self.policy.routing, self.siblings))
            else:
                if self.reference is None:
                    raise ValueError("compute_logprobs: no reference weights; set needs_reference=True for the trainer")
                # The reference model routes by itself: recorded routes are those of the policy.
                with using_weights(self.policy, self.reference):
                    logp_S, _ = self.forward(batch)
        return self._on_host(logp_S, batch)

    def compute_entropies(self, batch: Microbatch) -> Float32Array:
        """Entropies [S] of the policy in nats, at the temperatures of `batch`, without gradient."""
        if batch.scored == 0:
            return np.zeros(0, np.float32)
        with torch.no_grad():
            _, entropy_S = self.forward(batch, routes=forward_routes(batch, self.policy.routing, self.siblings))
        return self._on_host(entropy_S, batch)

    def _on_host(self, values_S: Tensor, batch: Microbatch) -> Float32Array:
        """`values_S`, a result of the newest forward, on the CPU. Errors: DataError if `batch` has ids that the model lacks."""
        result: Float32Array = values_S.float().cpu().numpy()
        if self.forward.has_unknown_ids:
            raise unknown_id_error([batch], self.policy.head.weight.shape[0])
        return result

    def survey(
        self, loss: Loss, batches: Sequence[Microbatch], entropies: Sequence[Float32Array]
    ) -> tuple[Loss, list[Microbatch]]:
        """Exchanges what a loss needs to know of the whole step, over all ranks, before the first backward: the counts, if two
        terms have different denominators; all entropies, if only the tokens with the highest entropy have a policy loss.
        A collective: every rank must call it before `begin_train_step`, also a rank without microbatches.

        Returns a loss whose terms share one normaliser, and the microbatches, with a `keep` column if the loss needs this column.
        `entropies`: [S] of each microbatch, in nats. Only used if `loss.top_entropy_quantile` is below 1.
        """
        loss, selected = self._with_entropy_control(loss), list(batches)
        if loss.top_entropy_quantile < 1:
            # `np.concatenate` needs an array, and this rank may have no microbatches.
            own = np.concatenate([np.zeros(0, np.float32), *(entropies if self._leads else ())])
            of_ranks = np.frombuffer(b"".join(self.world.all_gather_bytes(own.tobytes())), np.float32)
            threshold = entropy_threshold(torch.from_numpy(of_ranks.astype(np.float64)), loss.top_entropy_quantile)
            selected = [
                replace(batch, keep=entropy_S.astype(np.float64) >= threshold)
                for batch, entropy_S in zip(batches, entropies, strict=True)
            ]
        if not loss.bonus_needs_scale:
            return loss, selected
        counts = Counts(
            sequences=sum(batch.sequences for batch in selected),
            tokens=sum(batch.scored for batch in selected),
            microbatches=len(selected),
            kept=sum(batch.scored if batch.keep is None else int(batch.keep.sum()) for batch in selected),
        )
        totals = (counts if self._leads else Counts()).over_ranks(self.world, self.policy.device)
        denominator = totals.denominators(self.max_completion_length)[loss.normaliser]
        return loss.with_bonus_scale(denominator / max(totals.kept, 1.0)), selected

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`version`, `steps_done`, `entropy_control` (if used), and by parameter name `masters`, `optimizer`, `reference` (if any).

        Tensors are not copied. The caller must copy or write them on the device's thread before the next `finish_train_step`.
        Errors: TrainStepError while a step is committed but not closed.
        """
        if self._step is not None and self._step.committed:
            raise TrainStepError("state_dict: a committed step is not closed; call abort_train_step first")
        state: dict[str, Any] = {
            "version": self.version,
            "steps_done": self.steps_done,
            "masters": dict(self.parameters.named_masters()),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.control is not None:
            state["entropy_control"] = {"coefficient": self.control.coefficient, "entropy": self.control.entropy}
        elif self._saved_control:
            state["entropy_control"] = dict(self._saved_control)
        if self.reference is not None:
            flat = self.policy.weights
            state["reference"] = {name: flat.view(self.reference, i) for i, name in enumerate(flat.names)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies a result of `state_dict`. Errors: TrainStepError while a step is open, KeyError for a missing entry, and errors of
        `Parameters.load_masters`."""
        if self._step is not None:
            raise TrainStepError("load_state_dict: a train step is open; finish or abort it first")
        flat = self.policy.weights
        if self.reference is not None:
            if "reference" not in state:
                raise KeyError("the state has no reference model, but this trainer needs one for its loss")
            for index, name in enumerate(flat.names):
                copy_named(state["reference"], name, flat.view(self.reference, index))
        # Before the optimizer: for adapters of another LoRA rank, the error about the masters says more than the optimizer's.
        require_names("the state", self.parameters.names, state["masters"])
        self.parameters.load_masters(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.control, self._saved_control = None, state.get("entropy_control", {})
        self.policy.version = int(state["version"])
        self.steps_done = int(state["steps_done"])
        self.optimizer.set_lr(self.schedule.lr(self.steps_done))

    # -- parts of finish ---------------------------------------------------------------------------------------------

    def _require_open(self) -> TrainStep:
        if self._step is None:
            raise TrainStepError("no train step is open; call begin_train_step first")
        if self._step.committed:
            raise TrainStepError(
                f"the open train step was applied (version {self.version}), but failed afterwards; abort_train_step closes it"
            )
        return self._step

    def _with_entropy_control(self, loss: Loss) -> Loss:
        """The loss, with the present coefficient of the entropy bonus if `loss.control` is set. After a resume the coefficient is
        that of the checkpoint; target and delta are those of the configuration."""
        if loss.control is None:
            return loss
        if self.control is None:
            self.control = replace(loss.control, **self._saved_control)
        return loss.with_control(self.control)

    def _totals(self, step: TrainStep) -> Counts:
        """The counts of all ranks. Errors: TrainStepError without a sequence, DataError for ids that the model lacks."""
        step.counts.loss = step.metrics.loss_sum()
        step.counts.unknown_ids = float(sum(unknown_ids for _, unknown_ids, _ in step.results))
        totals = step.counts.over_ranks(self.world, self.policy.device)
        if totals.sequences == 0:
            raise TrainStepError(
                "this step has no sequence on any rank: the optimizer would move the weights by momentum and weight decay "
                "alone; abort the step"
            )
        if totals.unknown_ids:
            invalid = [batch for _, unknown_ids, batch in step.results if unknown_ids]
            raise unknown_id_error(invalid, self.policy.head.weight.shape[0])
        return totals

    def _reduce_metrics(self, step: TrainStep, denominators: Mapping[Normaliser, float]) -> dict[str, float]:
        """The metrics over all ranks. Errors: DivergenceError if ranks should have equal masters but differ (agreement.py)."""
        due = self.world.world_size > self.shards and self.steps_done >= self._compare_at
        sums = bit_sums(self.parameters) if due else torch.zeros(0, dtype=torch.int64)
        metrics, checksums = step.metrics.reduce(
            self.world, self.policy.device, denominators, exact_halves(sums.sum().view(1))
        )
        if due:
            self._compare_at = self.steps_done + COMPARE_EVERY
            names = list(self.parameters.names)
            require_same_weights(checksums, sums, names, self.world, self.shards, self.policy.device, self.version)
        return metrics

    def _zero_once(self, step: TrainStep) -> None:
        """Zeros the gradients, once a step. `begin_train_step` does not: zeroing would delay the publish of the previous step."""
        if not step.zeroed:
            self.parameters.zero_grad()
            step.zeroed = True

    def _check_mismatch(self, mismatch: float | None) -> None:
        gate = self.mismatch_gate
        if gate is not None and mismatch is not None and mismatch > gate:
            raise DivergenceError(
                f"the step after version {self.version} is not applied: trainer and sampler log-probs of that version differ by "
                f"{mismatch:.2g} nats on average; algorithm.mismatch_gate allows {gate}. The sampler does not use the trained "
                "weights. If another program samples and its log-probs are meant to differ, set algorithm.mismatch_gate to null"
            )

    def _clip(self, gradient: Tensor) -> float:
        """Scales the gradient to a norm of at most `grad_clip`. Returns the old norm. Errors: DivergenceError for NaN or inf."""
        norm = self._norm(gradient)
        if not math.isfinite(norm):
            raise DivergenceError(
                f"the gradient of the step after version {self.version} has norm {norm}; the weights are unchanged"
            )
        limit = self.config.grad_clip
        if limit is not None and norm > limit:
            gradient.mul_(limit / norm)
        return norm

    # `ShardedTrainer` overrides these three methods.

    def _reduce_gradients(self, gradient: Tensor) -> None:
        self.world.reduce_gradients_(gradient)

    def _norm(self, gradient: Tensor) -> float:
        return local_norm(gradient)

    def _advance(self) -> int:
        return self.policy.advance()


def _divergence(step: TrainStep, problem: str) -> DivergenceError:
    """An error. Its `groups` are the groups of the microbatches whose loss is not finite."""
    batches = [batch for total, _, batch in step.results if not math.isfinite(float(total))]
    error = DivergenceError(f"{problem}; the weights are unchanged")
    error.groups = tuple(dict.fromkeys(group for batch in batches for group in batch.group_ids.tolist()))
    return error


def local_norm(vector: Tensor) -> float:
    """Euclidean norm, summed in float64 over the norms of blocks. A float64 copy of the whole vector would take seconds."""
    end = vector.numel() // _NORM_BLOCK * _NORM_BLOCK
    parts = [torch.linalg.vector_norm(vector[:end].view(-1, _NORM_BLOCK), dim=1)] if end else []
    parts.append(torch.linalg.vector_norm(vector[end:]).view(1))
    return math.sqrt(sum(float(part.cpu().double().square().sum()) for part in parts))
