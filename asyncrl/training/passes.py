"""One forward over a microbatch: packed tokens in, log-prob and entropy of each scored token out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms.base import LossInputs, MetricSum
from asyncrl.errors import DataError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.copying import to_device
from asyncrl.models.head.logprobs import SpareMemory, token_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.models.routing import Routing
from asyncrl.records.routes import MISSING
from asyncrl.types import Microbatch, Normaliser

UNREPLAYED = "moe/unreplayed_tokens"


class Forward:
    """Sets train or eval mode itself at every call: the engine shares the module and leaves it in its own mode."""

    def __init__(self, policy: PolicyModel, checkpointing: bool = False, *, plain: bool = False) -> None:
        """`plain`: by the model's own forward, product for product what a sharded training forward computes."""
        self.policy = policy
        self._plain = plain
        self._spare = SpareMemory()
        self.outside = torch.tensor(False)  # of the newest call: see `ids_of`
        if checkpointing:
            policy.enable_checkpointing()

    def __call__(
        self, batch: Microbatch, entropy_grad: bool = False, *, routes: Routes | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logp_S, entropy_S) at the batch's temperatures; differentiable where gradients are enabled. `routes`: of it."""
        policy = self.policy
        policy.set_training(torch.is_grad_enabled())
        hidden = policy.plain_hidden if self._plain else policy.hidden
        plan = TreePlan.of(batch)
        plan.routes = routes
        tokens_T, target_S, self.outside = ids_of(batch, policy.head.weight.shape[0], policy.device)
        hidden_TE = hidden(tokens_T, to_device(batch.positions, policy.device), plan)
        if routes is not None:
            routes.require_all()
            self.outside = self.outside | routes.outside.to(self.outside.device)
        return token_logprobs(
            hidden_TE.index_select(0, to_device(batch.source, policy.device)),
            policy.head.weight,
            target_S,
            torch.from_numpy(batch.temperature),
            bias_V=policy.head.bias,
            transform=policy.transform,
            grad_buffer=policy.head_gradient,
            bias_grad=policy.head_bias_gradient,
            entropy_grad=entropy_grad,
            project=None if self._plain else policy.project,
            spare=self._spare,
            kernel=policy.head_kernel,
        )


def ids_of(batch: Microbatch, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T] and targets [S] on the device, within the vocabulary, and (0-d bool) whether some were not.

    They were checked when they came, but a record lies where its producer can still write. An id that the model lacks would end a
    GPU's context. Another one runs in its place, and nothing may come of the step: who reads its results anyway reads this, too."""
    given = [to_device(ids, device) for ids in (batch.tokens, batch.target)]
    tokens_T, target_S = (ids.clamp(0, vocabulary - 1) for ids in given)
    return tokens_T, target_S, (tokens_T != given[0]).any() | (target_S != given[1]).any()


def outside_error(batches: Sequence[Microbatch], vocabulary: int) -> DataError:
    """By the groups of these microbatches that hold an id which the model lacks, or, where that is a route, by all of them; no
    microbatch: it was another rank's."""
    found = dict[int, int]()  # such an id, by group
    for batch in batches:
        for row, (group, tree) in enumerate(zip(batch.group_ids.tolist(), batch.suffix_tree, strict=True)):
            prompt, start = batch.prefix_start[tree], batch.suffix_start[row]
            ran = np.r_[prompt : prompt + batch.prefix_length[tree], start : start + batch.suffix_length[row]]
            ids = np.append(batch.tokens[ran], batch.target[batch.sequence == row])
            if (wrong := ids[(ids < 0) | (ids >= vocabulary)]).size:
                found[group] = int(wrong[0])
    what = (
        "a route names no expert of the model" if batches else "a token or route of another rank is none of the model's"
    )
    if found:
        what = f"token {next(iter(found.values()))} is none of the model's, 0 to {vocabulary - 1}"
    error = DataError(
        f"{what}: changed after the group was checked (a producer may not write into a record that it has put)"
    )
    error.groups = tuple(found or dict.fromkeys(group for batch in batches for group in batch.group_ids.tolist()))
    return error


def routes_of(batch: Microbatch, routing: Routing | None, *, keep_logits: bool = False) -> Routes | None:
    """For one forward of the model of `routing`: the experts that were recorded, if they were. Errors: ValueError."""
    if batch.routes is None and not keep_logits:
        return None
    if routing is None:
        raise ValueError(
            "this microbatch holds routes of experts, or its experts are to be balanced, but the model has no routers that could "
            "be told"
        )
    if batch.routes is None:
        return routing.record(keep_logits=True)
    return routing.replay(batch.routes, keep_logits=keep_logits)


def unreplayed(routes_TLk: npt.NDArray[Any]) -> dict[str, MetricSum]:
    """How many tokens a router sends where it likes, in one layer at least, as nobody recorded where they went."""
    tokens = int((routes_TLk[:, :, 0] == MISSING).any(1).sum())
    return {UNREPLAYED: MetricSum(torch.tensor(tokens), Normaliser.NONE)}


def loss_inputs(batch: Microbatch, logp_S: Tensor, entropy_S: Tensor | None) -> LossInputs:
    """The columns of `batch` as tensors, in the dtype and on the device of `logp_S`."""

    def floats(values: npt.NDArray[object] | None) -> Tensor | None:  # type: ignore[type-var]  # numpy says: no scalar type
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
def swapped(policy: PolicyModel, weights: Tensor) -> Iterator[None]:
    """The modules compute with another flat buffer inside the block. Values move nowhere: the views are bound anew."""
    flat = policy.weights
    try:
        flat.bind(weights)
        yield
    finally:
        flat.bind(flat.working)
