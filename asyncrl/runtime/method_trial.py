"""Tries the user's own loss and advantage on a small batch before a run.

Shape legend: S scored tokens, G members of a group.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.base import Loss, LossInputs
from asyncrl.algorithms.registry import build_advantage, build_loss, loss_named
from asyncrl.config.imports import raised, user_code
from asyncrl.config.methods import flat_values
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

_LENGTHS = (3, 0, 2, 4, 1)  # scored tokens of each sequence
# Splits of the batch into microbatches of sequence numbers.
_UNSPLIT = ((0, 1, 2, 3, 4),)
_SPLITS = (((4,), (3,), (2,), (1,), (0,)), ((3, 1), (), (0, 4, 2)))


def try_loss(config: Config) -> None:
    """Check that sum and gradient of the loss are finite, and the same for every split of a batch into microbatches.
    Errors: ConfigError."""
    name, values = config.algorithm.loss, flat_values(config.algorithm)
    own = {setting.flat for setting in loss_named(name).settings()}
    loss = build_loss(name, **{flat: value for flat, value in values.items() if flat in own})
    subject = f"algorithm.loss is {name!r}, which was tried on a small batch"
    for with_old in (False, True):
        with user_code(lambda error: ConfigError(f"{subject}: {raised(error)}")):
            expected, *results = (_value_and_gradient(loss, split, with_old) for split in (_UNSPLIT, *_SPLITS))
        if not np.isfinite(expected).all():
            count = int((~np.isfinite(expected[1:])).sum())
            raise ConfigError(
                f"{subject}: its sum is {expected[0]:g}, and {count} numbers of its gradient are not finite; a sampler log-prob "
                "may be NaN; where the policy trains on its own data the ratio is 1, and its logarithm 0 (do not divide by it)"
            )
        for result in results:
            # The tolerance allows a loss that computes in float32.
            same = np.isclose(result, expected, rtol=1e-5, atol=1e-6)
            if not same.all():
                quantity = "gradient" if same[0] else "sum"
                raise ConfigError(
                    f"{subject}: the {quantity} of the batch changes if the batch is cut into microbatches (sums {result[0]:g}, "
                    f"{expected[0]:g}); return a loss per token that depends on no other sequence: the trainer divides once, by "
                    "`normaliser`"
                )


def _value_and_gradient(loss: Loss, split: tuple[tuple[int, ...], ...], with_old: bool) -> Any:
    """[1 + 2 S] the sum over the microbatches, then its gradients with respect to log-probs and entropies."""
    import torch

    noise = torch.randn(5, sum(_LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp_S, entropy_S = -noise[0].abs(), noise[1].abs()
    sampler_S, old_S, reference_S = logp_S + 0.3 * noise[2:]
    sampler_S[4] = float("nan")  # some samplers give no log-prob
    advantage_S = torch.tensor([1.3, 0.0, -0.4, 0.9, -0.7]).double().repeat_interleave(torch.tensor(_LENGTHS))
    leaves = logp_S.requires_grad_(), entropy_S.requires_grad_()
    tokens = torch.arange(len(logp_S)).split(_LENGTHS)  # of each sequence, along S
    value = torch.zeros((), dtype=torch.float64)
    for rows in split:
        index = torch.cat([tokens[row] for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        inputs = LossInputs(
            logp_S=logp_S[index],
            entropy_S=entropy_S[index] if loss.needs_entropy_grad else entropy_S[index].detach(),
            sampler_logp_S=sampler_S[index],
            advantage_S=advantage_S[index],
            sequence_S=torch.arange(len(rows)).repeat_interleave(torch.tensor([_LENGTHS[row] for row in rows]).long()),
            sequences=len(rows),
            old_logp_S=old_S[index] if with_old else None,
            reference_logp_S=reference_S[index] if loss.needs_reference else None,
        )
        total = loss(inputs).total
        total.backward()
        value += total.detach()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return torch.cat([value[None], *gradients]).numpy()


def try_advantage(config: Config) -> None:
    """Check that each member gets a finite advantage, and a member without a reward 0. Errors: ConfigError."""
    name, size = config.algorithm.advantage, config.rollout.group_size
    estimator = build_advantage(name, **flat_values(config.algorithm))
    rewards = [1.0, 0.0, None, 0.5] * size
    # The `defaultdict`s have every component that an advantage may read.
    groups = [
        GroupRewards(values, defaultdict(values.copy), defaultdict(lambda: 1.0), [3] * size)
        for values in (rewards[:size], [0.5] * size, [None] * size)
    ]
    subject = f"algorithm.advantage is {name!r}"
    with user_code(lambda error: ConfigError(f"{subject}, which was tried on a few rewards: {raised(error)}")):
        results = [*zip(groups, estimator.of_step(groups), strict=True)]
    for group, values_G in results:
        unscored = np.array([reward is None for reward in group.rewards])
        fits = isinstance(values_G, np.ndarray) and values_G.shape == (size,) and values_G.dtype.kind in "fiub"
        if not (fits and np.isfinite(values_G).all()) or values_G[unscored].any():
            raise ConfigError(
                f"{subject}, which makes {values_G!r} of the rewards {group.rewards}; expected a numpy array of a finite number "
                "for each member, 0 where the reward is None (asyncrl.as_rewards makes NaN of None)"
            )
