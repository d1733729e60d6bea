"""The train step under `distributed.sharding: fsdp`. The masters (master weights) are sharded over ranks. If the argument `keep` is
false, each microbatch gathers weights, and is a collective:

    train_microbatch   counts the microbatch and appends it to this rank's queue
    a round            the ranks exchange the lengths of their queues; all ranks run as many microbatches as the longest queue
                       has; a rank with an empty queue runs a microbatch of weight 0 through every sharded module
    finish             rounds until every rank is finishing, then the reduction of counts and the rest of the step

With `keep` every rank keeps the gathered weights and the whole gradients in memory during a step. Then there are no rounds:
microbatches run as they come, without a collective of all ranks, and finish begins with one reduction.

A microbatch without scored tokens, or of skipped groups, is counted and not queued. The ranks agree on a round by one reduction of
[ranks, 2] numbers: the length of each rank's queue, and whether the rank is finishing (adds no further microbatch to the step).
A finishing rank joins rounds until all ranks are finishing, so all ranks run the same collectives. `pumps/train.py` runs rounds.

Gradients are sums over all microbatches of all ranks, times 1/N (N: denominator of the loss). Nothing is divided by the number of
ranks. `finish_train_step` also gathers all weights in the matmul dtype into the policy, and then raises the policy's version. So no
other work on the device's thread sees new weights under the old version. The engine and forwards without gradient read the policy.

Shape legend: T packed tokens, S scored tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.algorithms.base import Loss, LossInputs, LossSums
from asyncrl.config.schema import TrainConfig
from asyncrl.distributed.collectives import Collectives
from asyncrl.distributed.fsdp import ShardedParameters
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.copying import to_device
from asyncrl.models.head.logprobs import HeadKernel, SpareMemory, token_logprobs
from asyncrl.models.head.output import HeadTransform, decoder_of
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.parameters.frozen import frozen_names, require_trained
from asyncrl.models.policy import PolicyModel, decoder_hidden, enable_checkpointing, prepare
from asyncrl.models.routes import Routes
from asyncrl.models.routing import Routing
from asyncrl.types import Float32Array, Microbatch, StepResult

from .accumulators import sum_over_ranks
from .context import Share
from .passes import PolicyForward, clamped_ids, forward_routes, loss_inputs
from .trainer import TorchTrainer, local_norm


class _Scoring(nn.Module):
    """The root of the sharded modules. FSDP gathers parameters only while this forward runs, so the chunked head runs here too."""

    def __init__(self, model: PreTrainedModel, transform: HeadTransform, kernel: HeadKernel | None) -> None:
        super().__init__()
        self.model = model
        self._transform = transform
        self._kernel = kernel
        self._spare = SpareMemory()

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        source_S: Tensor,
        target_S: Tensor,
        # A numpy array, not a tensor: FSDP2 would move a tensor to the device, but the kernel reads the temperatures on the host.
        temperature_S: Float32Array,
        plan: TreePlan,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden_TE = decoder_hidden(decoder_of(self.model), tokens_T, positions_T, plan)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden_TE.index_select(0, source_S),
            head.weight,
            target_S,
            torch.from_numpy(temperature_S),
            bias_V=head.bias,
            transform=self._transform,
            entropy_grad=entropy_grad,
            spare=self._spare,
            kernel=self._kernel,
        )


class ShardedForward:
    """The forward of a microbatch through the sharded model: (logp_S, entropy_S), with gradient. A collective."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyModel,
        checkpointing: bool,
        siblings: Collectives | None = None,
        **sharding: Any,
    ) -> None:
        """`model`: full weights, on the host or on the policy's device; it is sharded in place. `policy`: has the same model.
        `siblings`: see `TorchTrainer`. `sharding`: `collectives`, `shards`, `keep` of `ShardedParameters`. Errors: ConfigError."""
        self._siblings, self.device, dtype = siblings, policy.device, policy.dtype
        frozen = require_trained(model, frozen_names(model))
        prepare(model, dtype=dtype)
        model.eval()
        for layer in enable_checkpointing(model) if checkpointing else ():
            # Not `layer.train()`, which would also set the flags of the layer's children: see PolicyModel.set_training.
            layer.training = True
        self._scoring = _Scoring(model, policy.transform, policy.head_kernel)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self.has_unknown_ids = torch.tensor(False)  # see `PolicyForward`
        self.routing = Routing.of(model)
        self.parameters = ShardedParameters(
            self._scoring, blocks_of(model), self.device, dtype, "model.", frozen, **sharding
        )

    def __call__(self, batch: Microbatch, entropy_grad: bool, routes: Routes | None = None) -> tuple[Tensor, Tensor]:
        """`entropy_grad`: whether entropies have a gradient, too. `routes`: see `forward_routes`."""
        device, share = self.device, Share(batch, self._siblings)
        own, plan = share.own, share.plan()
        plan.routes = routes
        tokens_T, target_S, unknown_ids = clamped_ids(own, self._vocabulary, device)
        positions_T, source_S = to_device(own.positions, device), to_device(own.source, device)
        logp, entropy = self._scoring(tokens_T, positions_T, source_S, target_S, own.temperature, plan, entropy_grad)
        if routes is not None:
            routes.require_all()
            unknown_ids = unknown_ids | routes.outside.to(device)
        logp_S, entropy_S, self.has_unknown_ids = share.gather_scored(logp, entropy, unknown_ids)
        return logp_S, entropy_S

    def run_empty(self, entropy_grad: bool) -> None:
        """Forward and backward of weight 0: two tokens through every sharded module. For a rank with an empty queue."""
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)
        logp_S, entropy_S = self._scoring(
            tokens, positions, tokens[:1], tokens[1:], np.ones(1, np.float32), TreePlan([2]), entropy_grad
        )
        total = logp_S.sum() + entropy_S.sum() if entropy_grad else logp_S.sum()
        (total * 0.0).backward()


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder: the weights of a layer, experts included, are gathered together. Errors: ConfigError for a model
    without a list of layers, or with a module for each expert, because ranks run different experts."""
    expert_lists = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and name.endswith("experts")
    ]
    if expert_lists:
        raise ConfigError(
            f"distributed.sharding is fsdp, but {type(model).__name__} has a module for each expert ({expert_lists[0]}): ranks run "
            "different experts, and would wait for ever for gradients of the experts that they did not run; use "
            "distributed.sharding=replicate"
        )
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ConfigError(
            f"distributed.sharding is fsdp, but {type(model).__name__} has no list of decoder layers to shard; use "
            "distributed.sharding=replicate"
        )
    return list(layers)


class ShardedTrainer(TorchTrainer):
    """See TorchTrainer. The modules of `policy` hold a full copy of the weights in the matmul dtype, for engine and log-probs."""

    is_sharded = True

    def __init__(
        self,
        policy: PolicyModel,
        model: PreTrainedModel,
        config: TrainConfig,
        world: Collectives,
        *,
        shards: int | None = None,
        keep: bool = False,
        siblings: Collectives | None = None,
        **options: Any,
    ) -> None:
        """`model`: a second copy of the policy's model, with weights as they were loaded. It is sharded in place.
        `shards`, `keep`: see `ShardedParameters`. `siblings`, `options`: see `TorchTrainer`."""
        assert isinstance(policy.flat, ServedParameters)
        self._served = policy.flat
        self.keep = keep
        sharding = {"collectives": world, "shards": shards, "keep": keep}
        self.sharded = ShardedForward(model, policy, config.gradient_checkpointing, siblings, **sharding)
        self.shards = self.sharded.parameters.ranks
        self._queue: deque[Microbatch] = deque()
        self._agreed = 0  # microbatches of the round that this rank must still run
        self._all_finishing = False
        self._broken = False  # a forward or backward was cut off: FSDP needs a reset
        super().__init__(policy, config, world, parameters=self.sharded.parameters, siblings=siblings, **options)
        self.forward = PolicyForward(policy, unfused=True, siblings=siblings)
        held, rank, ranks = self.sharded.parameters, world.rank, world.world_size
        if held.rank + held.replica * held.ranks != rank or ranks % held.ranks:
            raise LifecycleError(
                f"the model was sharded for rank {held.rank} of {held.ranks} in torch's default process group, but this is rank "
                f"{rank} of {ranks}; leave that process group before this run"
            )

    # -- rounds ------------------------------------------------------------------------------------------------------

    def begin_train_step(self, loss: Loss) -> None:
        """As `TorchTrainer.begin_train_step`; no collective."""
        super().begin_train_step(loss)
        self._all_finishing = False

    def train_microbatch(self, batch: Microbatch) -> None:
        """Count the microbatch. With `keep`: run it, a collective of the siblings. Without `keep`: queue it, no collective."""
        step = self._require_open()
        if self.keep:
            self._broken = True
            super().train_microbatch(batch)
            self._broken = False
            return
        self._count(step, batch)
        if batch.scored > 0:
            self._queue.append(batch)

    def agree_on_round(self, *, finishing: bool) -> int:
        """Begin a round. Returns its number of microbatches: every rank must call `run_agreed` once for each. A collective.

        `finishing`: this rank adds no microbatch to this step any more. Once all ranks are finishing, the step can finish.
        """
        self._require_open()
        table = torch.zeros(self.world.world_size, 2, dtype=torch.float64)
        table[self.world.rank] = torch.tensor([len(self._queue), float(finishing)], dtype=torch.float64)
        table = sum_over_ranks(self.world, table, self.policy.device)
        self._agreed = int(table[:, 0].max())
        self._all_finishing = bool(table[:, 1].min() > 0)
        return self._agreed

    def run_agreed(self) -> None:
        """Run the next microbatch of this rank's queue. If the queue is empty, run a microbatch of weight 0. A collective."""
        step = self._require_open()
        assert self._agreed > 0, "called more often than `agree_on_round` returned"
        self._agreed -= 1
        self._broken = True
        with torch.enable_grad():
            if self._queue:
                self._run(step, self._queue.popleft())
            else:
                self._zero_once(step)
                self.sharded.run_empty(step.loss.needs_entropy_grad)
        self._broken = False

    def train_round(self, *, finishing: bool = False) -> None:
        for _ in range(self.agree_on_round(finishing=finishing)):
            self.run_agreed()

    @property
    def ready_to_finish(self) -> bool:
        """Whether all ranks are finishing, and all microbatches have run."""
        return self._all_finishing and self._agreed == 0

    def finish_train_step(self) -> StepResult:
        """See TorchTrainer. First runs the rounds that the caller has not run."""
        step = self._require_open()
        if self.keep:
            self._zero_once(step)
            self.sharded.parameters.reduce_()
        while not self.keep and not self.ready_to_finish:
            self.train_round(finishing=True)
        result = super().finish_train_step()
        self._all_finishing = False
        return result

    def abort_train_step(self) -> None:
        """See TorchTrainer. No collective: if this rank failed, the other ranks notice when this rank leaves the run."""
        if self._step is not None:
            self._queue.clear()
            self._agreed = 0
            if self._broken:
                self.sharded.parameters.reset()
                self._broken = False
        super().abort_train_step()

    # -- overridden parts of TorchTrainer ----------------------------------------------------------------------------

    def _evaluate(self, loss: Loss, batch: Microbatch) -> tuple[LossInputs, LossSums, Tensor]:
        routes = forward_routes(batch, self.sharded.routing, self.siblings, keep_logits=self.balance is not None)
        logp_S, entropy_S = self.sharded(batch, loss.needs_entropy_grad, routes)
        return *self._sums(loss, loss_inputs(batch, logp_S, entropy_S), batch, routes), self.sharded.has_unknown_ids

    def _reduce_gradients(self, gradient: Tensor) -> None:
        """Does nothing. The gradients are summed over ranks already: by each backward, or by `finish_train_step` with `keep`."""

    def _norm(self, gradient: Tensor) -> float:
        """The norm over the shards of all ranks. A collective."""
        # Each replica, a set of ranks with one copy of the model, has the same gradients. So only replica 0 counts.
        counted = self.sharded.parameters.replica == 0
        squared_norm = torch.tensor([local_norm(gradient) ** 2 if counted else 0.0], dtype=torch.float64)
        return math.sqrt(float(sum_over_ranks(self.world, squared_norm, self.policy.device)))

    def _advance(self) -> int:
        """Gather all weights into the policy's modules, then raise its version. A collective."""
        self.sharded.parameters.gather(self._served.write)
        return self.policy.advance()

    def state_dict(self) -> dict[str, Any]:
        """The state of TorchTrainer, with this rank's rows of masters and optimizer. `shard` has the index of this rank in its
        replica, and the number of ranks in a replica. Only rank 0 has the reference."""
        state = super().state_dict()
        parameters = self.sharded.parameters
        state["shard"] = {"rank": parameters.rank, "ranks": parameters.ranks}
        if self.world.rank:
            state.pop("reference", None)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state with the rows of all ranks (`join_shards`). With `keep` a collective."""
        parameters, masters = self.sharded.parameters, state["masters"]

        def local_rows(value: Tensor) -> Tensor:
            # A copy: a view would keep the whole tensor alive. The scalar `step` has no rows.
            return value if value.ndim == 0 else parameters.local(value).clone()

        optimizer = {
            name: {key: local_rows(value) for key, value in saved.items()} for name, saved in state["optimizer"].items()
        }
        super().load_state_dict({**state, "optimizer": optimizer})
        served = self._served
        for name in parameters.names:
            served.write(name, masters[name])
        served.refresh()
