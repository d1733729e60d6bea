"""One forward over a microbatch: from packed tokens to log-prob and entropy of each scored token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms.base import LossInputs, MetricSum
from asyncrl.distributed.collectives import Collectives
from asyncrl.errors import DataError
from asyncrl.models.copying import to_device
from asyncrl.models.head.logprobs import SpareMemory, token_logprobs
from asyncrl.models.policy import PolicyModel, decoder_hidden
from asyncrl.models.routes import Routes
from asyncrl.models.routing import Routing
from asyncrl.records.check import MISSING
from asyncrl.types import Microbatch, Normaliser

from .context import Share, tokens_of_rank

UNREPLAYED = "moe/unreplayed_tokens"


class PolicyForward:
    """The forward of the trainer. Each call turns gradient checkpointing on or off, because the engine uses the same modules."""

    def __init__(
        self,
        policy: PolicyModel,
        checkpointing: bool = False,
        *,
        unfused: bool = False,
        siblings: Collectives | None = None,
    ) -> None:
        """`unfused`: use the layers of transformers instead of fused layers, so that results equal those of a sharded trainer.
        `siblings`: the ranks that share each microbatch (context.py). Siblings must make the same calls. None: this rank alone."""
        self.policy = policy
        self._siblings = siblings
        self._unfused = unfused
        self._spare = SpareMemory()
        # 0-d bool: whether the newest call had tokens (`clamped_ids`) or experts that the model lacks.
        self.has_unknown_ids = torch.tensor(False)
        if checkpointing:
            policy.enable_checkpointing()

    def __call__(
        self, batch: Microbatch, entropy_grad: bool = False, *, routes: Routes | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logp_S, entropy_S) at the temperatures of `batch`. With gradients enabled logp_S is differentiable, and entropy_S too if
        `entropy_grad`. `routes`: see `forward_routes`."""
        policy = self.policy
        policy.set_training(torch.is_grad_enabled())
        hidden = partial(decoder_hidden, policy.decoder) if self._unfused else policy.hidden
        share = Share(batch, self._siblings)
        own, plan = share.own, share.plan()
        plan.routes = routes
        tokens_T, target_S, unknown_ids = clamped_ids(own, policy.head.weight.shape[0], policy.device)
        hidden_TE = hidden(tokens_T, to_device(own.positions, policy.device), plan)
        if routes is not None:
            routes.require_all()
            unknown_ids = unknown_ids | routes.outside.to(unknown_ids.device)
        logp, entropy = token_logprobs(
            hidden_TE.index_select(0, to_device(own.source, policy.device)),
            policy.head.weight,
            target_S,
            torch.from_numpy(own.temperature),
            bias_V=policy.head.bias,
            transform=policy.transform,
            grad_buffer=policy.head_gradient,
            bias_grad=policy.head_bias_gradient,
            entropy_grad=entropy_grad,
            project=None if self._unfused else policy.project,
            spare=self._spare,
            kernel=policy.head_kernel,
        )
        logp_S, entropy_S, self.has_unknown_ids = share.gather_scored(logp, entropy, unknown_ids)
        return logp_S, entropy_S


def clamped_ids(batch: Microbatch, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [T], targets [S], 0-d bool) on the device. Ids are clamped to the vocabulary; the bool is true if some id changed.

    Ids were checked on arrival, but a producer can write into shared memory later. An unknown id would make the CUDA context
    unusable, so the nearest valid id takes its place. If the bool is true, the caller must discard all results of the step."""
    tokens_T, target_S = to_device(batch.tokens, device), to_device(batch.target, device)
    valid_T, valid_S = tokens_T.clamp(0, vocabulary - 1), target_S.clamp(0, vocabulary - 1)
    return valid_T, valid_S, (valid_T != tokens_T).any() | (valid_S != target_S).any()


def unknown_id_error(batches: Sequence[Microbatch], vocabulary: int) -> DataError:
    """The error for `batches`, the microbatches with ids that the model lacks. Empty `batches`: the ids are on another rank.
    `error.groups`: the groups with an unknown token. If only experts are unknown: all groups of `batches`."""
    unknown = dict[int, int]()  # group -> an unknown id
    for batch in batches:
        node_T = np.repeat(np.arange(batch.node_length.size), batch.node_length)
        for row, group in enumerate(batch.group_ids.tolist()):
            in_row_T = np.isin(node_T, batch.member_node[batch.member_sequence == row])
            ids = np.append(batch.tokens[in_row_T], batch.target[batch.sequence == row])
            if (bad := ids[(ids < 0) | (ids >= vocabulary)]).size:
                unknown[group] = int(bad[0])
    if unknown:
        problem = f"the model has no token {next(iter(unknown.values()))}, only 0 to {vocabulary - 1}"
    elif batches:
        problem = "a route names an expert that the model lacks"
    else:
        problem = "another rank has a token or a route that the model lacks"
    error = DataError(f"{problem}: a record changed after it was checked; a producer must not change records after put")
    error.groups = tuple(unknown or dict.fromkeys(group for batch in batches for group in batch.group_ids.tolist()))
    return error


def forward_routes(
    batch: Microbatch, routing: Routing | None, siblings: Collectives | None = None, *, keep_logits: bool = False
) -> Routes | None:
    """The `Routes` of one forward. They replay the recorded experts of `batch`, if any. With `keep_logits` they keep the logits of
    the routers. With `siblings` they cover the tokens of this rank.

    None if there is nothing to replay or keep. Errors: ValueError if `routing` is None and there is something to replay or keep."""
    if batch.routes is None and not keep_logits:
        return None
    if routing is None:
        raise ValueError(
            "this microbatch has routes of experts, or its experts are to be balanced, but asyncrl supports no router of the model"
        )
    if batch.routes is None:
        return routing.record(keep_logits=True)
    return routing.replay(tokens_of_rank(batch.routes, siblings, MISSING), keep_logits=keep_logits)


def replay_gaps(routes_TLk: npt.NDArray[Any]) -> dict[str, MetricSum]:
    """The metric that counts tokens for which a layer has no recorded experts. In such a layer the router chooses the experts."""
    tokens = int((routes_TLk[:, :, 0] == MISSING).any(1).sum())
    return {UNREPLAYED: MetricSum(torch.tensor(tokens), Normaliser.NONE)}


def loss_inputs(batch: Microbatch, logp_S: Tensor, entropy_S: Tensor | None) -> LossInputs:
    """The columns of `batch` as tensors on the device of `logp_S`. Columns of real numbers get the dtype of `logp_S`."""

    def floats(values: npt.NDArray[object] | None) -> Tensor | None:  # type: ignore[type-var]  # not a numpy scalar type
        return None if values is None else to_device(values, logp_S.device).to(logp_S.dtype)

    sampler_S, advantage_S = floats(batch.sampler_logprobs), floats(batch.advantages)
    assert sampler_S is not None and advantage_S is not None
    return LossInputs(
        logp_S=logp_S,
        entropy_S=entropy_S,
        sampler_logp_S=sampler_S,
        advantage_S=advantage_S,
        sequence_S=to_device(batch.sequence, logp_S.device),
        sequences=batch.sequences,
        old_logp_S=floats(batch.old_logprobs),
        reference_logp_S=floats(batch.reference_logprobs),
        keep_S=None if batch.keep is None else to_device(batch.keep, logp_S.device),
    )


@contextmanager
def using_weights(policy: PolicyModel, weights: Tensor) -> Iterator[None]:
    """Within the `with` block the modules read the flat buffer `weights`. No values are copied."""
    flat = policy.weights
    try:
        flat.bind(weights)
        yield
    finally:
        flat.bind(flat.working)
