"""The split train step under `distributed.sharding: fsdp`: the masters lie cut over the ranks, each microbatch is a collective.

    train_microbatch   the microbatch waits in this rank's queue; its counts are taken at once
    a round            every rank says how many microbatches wait; all ranks run as many as the longest queue holds; whose
                       queue is empty runs one of weight 0, through every sharded module
    finish             rounds until every rank says that it is finishing, then the reduction of counts, and the rest

What has no scored token, or was skipped because it cannot move a weight, is counted and never asks for a place in a round:
that is the skip at round agreement. A round is agreed by one reduction of [ranks, 2] numbers, which also says who is
finishing: ranks that come to a finish while others ask for a round take part in the round first, so collectives never
cross, however many rounds each rank asked for. Nobody may be left without a reason to come: see `pumps/train.py`.

No product is divided by the number of ranks: gradients are sums over all microbatches of all ranks, then x 1/N as ever.
After the optimizer step the same closure gathers all weights into the policy that the engine reads, in the matmul dtype,
and moves its version (invariant 5b). Log-probs without gradient come from that copy: no collective, any time.

Shape legend: T packed tokens, S scored tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.algorithms.base import Loss, LossInputs, LossSums
from asyncrl.config.schema import TrainConfig
from asyncrl.distributed.fsdp import ShardedParameters
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.copying import to_device
from asyncrl.models.head.logprobs import HeadKernel, Spare, token_logprobs
from asyncrl.models.head.output import HeadTransform, decoder_of
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.parameters.frozen import frozen_names, require_trained
from asyncrl.models.policy import PolicyModel, decode, enable_checkpointing, prepare
from asyncrl.models.routes import Routes
from asyncrl.models.routing import Routing
from asyncrl.types import Float32Array, Microbatch, StepResult

from .passes import Forward, ids_of, loss_inputs, routes_of
from .reducer import Reducer, sum_over_ranks
from .trainer import TorchTrainer, local_norm


class _Scoring(nn.Module):
    """The root of the sharded tree: whatever reads a parameter, the chunked head too, happens inside its forward."""

    def __init__(self, model: PreTrainedModel, transform: HeadTransform, kernel: HeadKernel | None) -> None:
        super().__init__()
        self.model = model
        self._transform = transform
        self._kernel = kernel
        self._spare = Spare()

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        source_S: Tensor,
        target_S: Tensor,
        # No tensor: FSDP2 moves those to the device, and the kernel wants it on the host.
        temperature_S: Float32Array,
        plan: TreePlan,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden_TE = decode(decoder_of(self.model), tokens_T, positions_T, plan)
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
    """(logp_S, entropy_S) of a microbatch through the sharded model, with gradient. A collective."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        dtype: torch.dtype,
        checkpointing: bool,
        transform: HeadTransform,
        kernel: HeadKernel | None = None,
    ) -> None:
        """`model`: full weights, on the host or on `device`; it is cut in place. `transform`: of its logits, as the policy has
        found. Errors: ConfigError."""
        frozen = require_trained(model, frozen_names(model))
        prepare(model, dtype=dtype)
        master = torch.float64 if dtype == torch.float64 else torch.float32
        for parameter in model.parameters():  # and no buffer: rotary tables stay as they were computed
            parameter.data = parameter.data.to(master)
        model.eval()
        for layer in enable_checkpointing(model) if checkpointing else ():
            # The layer alone, nothing inside it: see PolicyModel.set_training.
            layer.training = True
        self._scoring = _Scoring(model, transform, kernel)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self.outside = torch.tensor(False)  # of the newest call: see `ids_of`
        self.device = device
        self.routing = Routing.of(model)
        self.parameters = ShardedParameters(self._scoring, blocks_of(model), device, dtype, "model.", frozen)

    def __call__(self, batch: Microbatch, entropy_grad: bool, routes: Routes | None = None) -> tuple[Tensor, Tensor]:
        """`entropy_grad`: whether the entropies carry a gradient, too. `routes`: of this forward."""
        device, plan = self.device, TreePlan.of(batch)
        plan.routes = routes
        tokens_T, target_S, self.outside = ids_of(batch, self._vocabulary, device)
        result: tuple[Tensor, Tensor] = self._scoring(
            tokens_T,
            to_device(batch.positions, device),
            to_device(batch.source, device),
            target_S,
            batch.temperature,
            plan,
            entropy_grad,
        )
        if routes is not None:
            routes.require_all()
            self.outside = self.outside | routes.outside.to(device)
        return result

    def run_empty(self, entropy_grad: bool) -> None:
        """Forward and backward of weight 0: two tokens through every sharded module, for a round without work."""
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        logp_S, entropy_S = self._scoring(
            tokens,
            torch.arange(2, device=self.device),
            tokens[:1],
            tokens[1:],
            np.ones(1, np.float32),
            TreePlan([0], [2]),
            entropy_grad,
        )
        total = logp_S.sum() + entropy_S.sum() if entropy_grad else logp_S.sum()
        (total * 0.0).backward()


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers: whoever runs one gathers all of it, its experts too. Errors: ConfigError for a model that is not made
    of them, or whose experts are modules each, of which some would not run on some rank."""
    lists = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and name.endswith("experts")
    ]
    if lists:
        raise ConfigError(
            f"distributed.sharding is fsdp, but {type(model).__name__} has a module for each expert ({lists[0]}): which of them "
            "run differs between ranks, and a rank would wait for ever for the gradients of the others; use "
            "distributed.sharding=replicate"
        )
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ConfigError(
            f"distributed.sharding is fsdp, but {type(model).__name__} has no list of decoder layers to cut by; use "
            "distributed.sharding=replicate"
        )
    return list(layers)


class ShardedTrainer(TorchTrainer):
    """See TorchTrainer. `policy` is a served one: its modules hold all weights in the matmul dtype for engine and log-probs."""

    is_sharded = True

    def __init__(
        self,
        policy: PolicyModel,
        model: PreTrainedModel,
        config: TrainConfig,
        reducer: Reducer | None = None,
        *,
        max_completion_length: int,
        needs_reference: bool = False,
        updates_per_batch: int = 1,
        mismatch_gate: float | Literal["auto"] | None = None,
    ) -> None:
        """`model`: the same model as the policy's, another object, weights in float32 or wider: it is cut in place."""
        assert isinstance(policy.flat, ServedParameters)
        self._served = policy.flat
        self.sharded = ShardedForward(
            model, policy.device, policy.dtype, config.gradient_checkpointing, policy.transform, policy.head_kernel
        )
        self._queue: deque[Microbatch] = deque()
        self._agreed = 0  # microbatches of this round that were not run yet
        self._all_finishing = False
        self._broken = False  # a forward or backward did not end
        super().__init__(
            policy,
            config,
            reducer,
            max_completion_length=max_completion_length,
            needs_reference=needs_reference,
            updates_per_batch=updates_per_batch,
            mismatch_gate=mismatch_gate,
            parameters=self.sharded.parameters,
        )
        self.forward = Forward(policy, plain=True)
        found = self.sharded.parameters
        if (found.rank, found.ranks) != (self.reducer.rank, self.reducer.world_size):
            raise LifecycleError(
                f"the model was cut for rank {found.rank} of {found.ranks}, torch's default process group, but this is rank "
                f"{self.reducer.rank} of {self.reducer.world_size}; leave that group before a run of its own"
            )

    # -- rounds ------------------------------------------------------------------------------------------------------

    def begin_train_step(self, loss: Loss) -> None:
        """As `TorchTrainer.begin_train_step`; no collective."""
        super().begin_train_step(loss)
        self._all_finishing = False

    def train_microbatch(self, batch: Microbatch) -> None:
        """Count, and wait for a round. No collective."""
        self._count(self._require_open(), batch)
        if batch.scored > 0:
            self._queue.append(batch)

    def agree_on_round(self, *, finishing: bool) -> int:
        """How many microbatches every rank runs now (`run_agreed`, that often). A collective.

        `finishing`: this rank will come to no more rounds of this step. Once all say so, `finish_train_step` goes on.
        """
        self._require_open()
        table = torch.zeros(self.reducer.world_size, 2, dtype=torch.float64)
        table[self.reducer.rank] = torch.tensor([len(self._queue), float(finishing)], dtype=torch.float64)
        table = sum_over_ranks(self.reducer, table, self.policy.device)
        self._agreed = int(table[:, 0].max())
        self._all_finishing = bool(table[:, 1].min() > 0)
        return self._agreed

    def run_agreed(self) -> None:
        """One microbatch of this rank, or one of weight 0. A collective."""
        step = self._require_open()
        assert self._agreed > 0, "every rank runs what was agreed on, and no more"
        self._agreed -= 1
        self._broken = True
        with torch.enable_grad():
            if self._queue:
                self._run(step, self._queue.popleft())
            else:
                self._zero_once(step)
                self.sharded.run_empty(step.loss.needs_entropy_grad)
        self._broken = False

    def train_round(self) -> None:
        for _ in range(self.agree_on_round(finishing=False)):
            self.run_agreed()

    @property
    def ready_to_finish(self) -> bool:
        """All microbatches of all ranks were run, and nobody adds one."""
        return self._all_finishing and self._agreed == 0

    def finish_train_step(self) -> StepResult:
        """See TorchTrainer. Runs what is left first; also where the caller has done so by `agree_on_round`."""
        self._require_open()
        while not self.ready_to_finish:
            for _ in range(self.agree_on_round(finishing=True)):
                self.run_agreed()
        result = super().finish_train_step()
        self._all_finishing = False
        return result

    def abort_train_step(self) -> None:
        """See TorchTrainer. Local: the other ranks hear of it by what ends this one's part of the run."""
        if self._step is not None:
            self._queue.clear()
            self._agreed = 0
            if self._broken:
                self.sharded.parameters.reset()
                self._broken = False
        super().abort_train_step()

    # -- what differs from a flat layout -----------------------------------------------------------------------------

    def _evaluate(self, loss: Loss, batch: Microbatch) -> tuple[LossInputs, LossSums, Tensor]:
        routes = routes_of(batch, self.sharded.routing, keep_logits=self.balance is not None)
        logp_S, entropy_S = self.sharded(batch, loss.needs_entropy_grad, routes)
        return *self._sums(loss, loss_inputs(batch, logp_S, entropy_S), batch, routes), self.sharded.outside

    def _reduce_gradients(self, gradient: Tensor) -> None:
        """Nothing: each backward has summed over ranks."""

    def _norm(self, gradient: Tensor) -> float:
        """Over all shards, each of which one rank holds."""
        mine = torch.tensor([local_norm(gradient) ** 2], dtype=torch.float64)
        return math.sqrt(float(sum_over_ranks(self.reducer, mine, self.policy.device)))

    def _advance(self) -> int:
        """All weights into the policy's modules: a collective. Then its version moves."""
        self.sharded.parameters.gather(self._served.write)
        return self.policy.advance()

    def state_dict(self) -> dict[str, Any]:
        """As TorchTrainer's, with this rank's rows of masters and optimizer, and `shard`: rank and ranks. Only rank 0's
        holds the reference. `checkpoint/shards.py` makes one of all ranks'."""
        state = super().state_dict()
        parameters = self.sharded.parameters
        state["shard"] = {"rank": parameters.rank, "ranks": parameters.ranks}
        if parameters.rank:
            state.pop("reference", None)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, of a whole state (all rows). No collective."""
        parameters, masters = self.sharded.parameters, state["masters"]
        # Copies of the rows: views would keep every whole tensor alive.
        cut = {
            name: {key: value if value.ndim == 0 else parameters.local(value).clone() for key, value in saved.items()}
            for name, saved in state["optimizer"].items()
        }
        super().load_state_dict({**state, "optimizer": cut})
        served = self._served
        for name in parameters.names:
            served.write(name, masters[name])
        served.refresh()
