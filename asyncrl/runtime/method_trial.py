"""A loss and an advantage of the user's, tried on a small batch before a run, by the properties that ours have.

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
from asyncrl.config.methods import numbers
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

_LENGTHS = (3, 0, 2, 4, 1)  # scored tokens; a sequence without any counts, too
_WHOLE = ((0, 1, 2, 3, 4),)
_CUTS = (((4,), (3,), (2,), (1,), (0,)), ((3, 1), (), (0, 4, 2)))


def try_loss(config: Config) -> None:
    """That the sum over microbatches, however a batch is cut, is that of the batch, with its gradient, and that both are finite.
    Errors: ConfigError."""
    name, given = config.algorithm.loss, numbers(config.algorithm)
    read = {each.flat for each in loss_named(name).settings()}
    loss = build_loss(name, **{flat: value for flat, value in given.items() if flat in read})
    said = f"algorithm.loss is {name!r}, which was tried on a small batch"
    for old in (False, True):
        with user_code(lambda error: ConfigError(f"{said}: {raised(error)}")):
            whole, *others = (_value_and_gradient(loss, cut, old) for cut in (_WHOLE, *_CUTS))
        if not np.isfinite(whole).all():
            missed = int((~np.isfinite(whole[1:])).sum())
            raise ConfigError(
                f"{said}: its sum is {whole[0]:g}, and {missed} numbers of its gradient are not finite; a sampler log-prob may be "
                "NaN, and a ratio is 1 where the policy trains on its own data"
            )
        for found in others:
            same = np.isclose(found, whole, rtol=1e-5, atol=1e-6)  # a loss may compute in float32
            if not same.all():
                what = "gradient" if same[0] else "sum"
                raise ConfigError(
                    f"{said}: the {what} of the batch cut into microbatches is not that of the whole ({found[0]:g}, {whole[0]:g}); "
                    "return a loss per token, which depends on no other sequence: the trainer divides once, by `normaliser`"
                )


def _value_and_gradient(loss: Loss, cut: tuple[tuple[int, ...], ...], old: bool) -> Any:
    """[1 + 2 S] the sum over the microbatches, and its gradient by log-probs and entropies."""
    import torch

    noise = torch.randn(5, sum(_LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp_S, entropy_S = -noise[0].abs(), noise[1].abs()
    sampler_S, old_S, reference_S = logp_S + 0.3 * noise[2:]
    sampler_S[4] = float("nan")  # not every sampler says it of every token
    advantage_S = torch.tensor([1.3, 0.0, -0.4, 0.9, -0.7]).double().repeat_interleave(torch.tensor(_LENGTHS))
    leaves, tokens = (logp_S.requires_grad_(), entropy_S.requires_grad_()), torch.arange(len(logp_S)).split(_LENGTHS)
    value = torch.zeros((), dtype=torch.float64)
    for rows in cut:
        at = torch.cat([tokens[row] for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        inputs = LossInputs(
            logp_S=logp_S[at],
            entropy_S=entropy_S[at] if loss.needs_entropy_grad else entropy_S[at].detach(),
            sampler_logp_S=sampler_S[at],
            advantage_S=advantage_S[at],
            sequence_S=torch.arange(len(rows)).repeat_interleave(torch.tensor([_LENGTHS[row] for row in rows]).long()),
            sequences=len(rows),
            old_logp_S=old_S[at] if old else None,
            reference_logp_S=reference_S[at] if loss.needs_reference else None,
        )
        total = loss(inputs).total
        total.backward()
        value += total.detach()
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return torch.cat([value[None], *found]).numpy()


def try_advantage(config: Config) -> None:
    """That each member gets a finite number, and one without a reward 0. Errors: ConfigError."""
    name, size = config.algorithm.advantage, config.rollout.group_size
    estimator = build_advantage(name, **numbers(config.algorithm))
    rewards = [1.0, 0.0, None, 0.5] * size
    groups = [  # with a component of every name that is asked for
        GroupRewards(each, defaultdict(each.copy), defaultdict(lambda: 1.0), [3] * size)
        for each in (rewards[:size], [0.5] * size, [None] * size)
    ]
    said = f"algorithm.advantage is {name!r}"
    with user_code(lambda error: ConfigError(f"{said}, which was tried on a few rewards: {raised(error)}")):
        found = [*zip(groups, estimator.of_step(groups), strict=True)]
    for group, values_G in found:
        unscored = np.array([reward is None for reward in group.rewards])
        fits = isinstance(values_G, np.ndarray) and values_G.shape == (size,) and np.isfinite(values_G).all()
        if not fits or values_G[unscored].any():
            raise ConfigError(
                f"{said}, which makes {values_G!r} of the rewards {group.rewards}; expected a numpy array of a finite number for "
                "each member, 0 where the reward is None (asyncrl.as_rewards makes NaN of None)"
            )
