"""The auxiliary loss that balances experts (Fedus et al., arXiv:2101.03961, equations 4 to 6). Used if the model's configuration
has `output_router_logits` and a `router_aux_loss_coef`.

    balance of a sequence     E x sum over experts of (share of tokens sent to the expert) x (mean probability). Share and mean
                              are over all layers and all forwarded tokens of prompt and completion. The balance equals
                              `load_balancing_loss_func` of transformers for a batch of this one sequence. A token
                              that several branches share counts once
    added to the loss         coefficient x the mean balance of the step's sequences, weighted as the loss weights them

The balance is computed for each sequence, so it does not depend on how a step is split into microbatches or ranks. (The balance of
a batch would depend on the split, because the formula is no sum over tokens.) With the normaliser `tokens` the weight of a sequence
in the mean is its share of the scored tokens. With `sequences` the weight is 1 / sequences. The weights add up to 1, so a
coefficient has the same effect with each normaliser. (Only the weights of `bnpo` depend on the split: `bnpo` takes a mean inside
each microbatch.) Sequences without a scored token are not forwarded, and have a balance of 0.

An expert counts as chosen if its logit is one of the k largest, as in transformers. This also holds where recorded routes are
replayed, or where a model adds a bias before it chooses (Ernie 4.5, MiniMax-M3).

Shape legend: T packed tokens, N nodes, K pairs of a sequence and a node, B sequences, L layers with experts, k experts a token,
E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss, LossInputs, LossSums, MetricSum
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.models.copying import to_device
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.models.routing import require_routing
from asyncrl.types import Microbatch, Normaliser

BALANCE_METRIC = "moe/balance_loss"


@dataclass(frozen=True, slots=True)
class Balance:
    """Adds the balance of the experts to a loss."""

    coefficient: float
    max_length: int  # tokens; for the normaliser `SEQUENCES_X_MAX_LENGTH`

    @classmethod
    def of(cls, policy: PolicyModel, train: TrainConfig, max_length: int) -> Balance | None:
        """From the model's configuration; None if the configuration asks for no balance. `max_length`: tokens. Errors: ConfigError
        for a model without known routers, or with `train.skip_zero_advantage`."""
        text = policy.config.get_text_config()
        coefficient = getattr(text, "router_aux_loss_coef", None)
        if not getattr(text, "output_router_logits", False) or not coefficient:
            return None
        asked = f"the model's configuration has output_router_logits and router_aux_loss_coef {coefficient:g}"
        require_routing(policy.routing, policy.module, asked)
        if train.skip_zero_advantage:
            raise ConfigError(
                f"train.skip_zero_advantage is true and {asked}: groups without an advantage count for the balance too; "
                "leave out train.skip_zero_advantage, or set output_router_logits to false in the model's config.json"
            )
        return cls(float(coefficient), max_length)

    def sums_with_balance(self, loss: Loss, inputs: LossInputs, balance_B: Tensor) -> LossSums:
        """The sums of `loss`, with the balance added to the total and to the metrics."""
        sums, length_B = loss(inputs), inputs.length_B
        if loss.normaliser is Normaliser.TOKENS:
            value = (length_B * balance_B).sum()
        elif loss.normaliser is Normaliser.MICROBATCHES:
            value = (length_B * balance_B).sum() / length_B.sum().clamp(min=1)
        else:
            value = balance_B.sum() * (self.max_length if loss.normaliser is Normaliser.SEQUENCES_X_MAX_LENGTH else 1)
        metrics = {**sums.metrics, BALANCE_METRIC: MetricSum(value.detach(), loss.normaliser)}
        return LossSums(sums.total + self.coefficient * value, metrics)


def balance_of(routes: Routes, batch: Microbatch) -> Tensor:
    """[B] balance of each sequence, differentiable; 0 without a scored token. `routes`: routes of the forward, with logits. Adds
    up one layer at a time. Besides the logits, only the probabilities take L x T x E numbers, because backward needs them."""
    k = routes.chosen[0].shape[1]
    sent_TE, probs_TE = _of_layer(routes.logits[0], k)
    for layer in range(1, len(routes.logits)):
        sent, probs = _of_layer(routes.logits[layer], k)
        sent_TE += sent
        probs_TE = probs_TE + probs
    sent_BE, tokens_B = _over_sequences(sent_TE, batch)
    probs_BE, _ = _over_sequences(probs_TE, batch)
    choices_B = tokens_B * len(routes.logits)
    return probs_TE.shape[1] * (sent_BE * probs_BE).sum(1) / choices_B.square()


def _of_layer(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[T, E] 1 where a token is sent to an expert, else 0; and [T, E] differentiable probabilities."""
    probs_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    largest_Tk = probs_TE.detach().topk(k, -1).indices
    return torch.zeros_like(probs_TE).scatter_(1, largest_Tk, 1.0), probs_TE


def _over_sequences(value_TE: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
    """[T, E] -> [B, E]: the sum over the tokens of each sequence, prompt included (0 without a scored token); and the number of
    these tokens [B], at least 1."""
    device, nodes, experts = value_TE.device, batch.node_length.size, value_TE.shape[1]
    node_T = to_device(np.repeat(np.arange(nodes), batch.node_length), device)
    sums_NE = value_TE.new_zeros(nodes, experts).index_add(0, node_T, value_TE)
    # A sequence without a scored token has no node.
    sequence_K, node_K = to_device(batch.member_sequence, device), to_device(batch.member_node, device)
    sums_BE = value_TE.new_zeros(batch.sequences, experts).index_add(0, sequence_K, sums_NE[node_K])
    tokens_B = np.bincount(batch.member_sequence, batch.node_length[batch.member_node], batch.sequences)
    return sums_BE, torch.from_numpy(np.maximum(tokens_B, 1)).to(value_TE)
