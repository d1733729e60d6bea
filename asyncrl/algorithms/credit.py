"""Credit of an episode with several replies (`algorithm.credit`): which reward a reply gets, and which replies are trained.

    episode       each reply gets the advantage of the episode's reward. GRPO with outcome supervision: Shao et al., "DeepSeekMath"
                  (arXiv:2402.03300), section 4.1.2
    discounted    each reply gets the advantage of its own return, G_t = sum over k >= t of gamma^(k - t) r_k (Sutton and
                  Barto, "Reinforcement Learning", second edition, equation 3.8; for the replies of a language model: Baronio et
                  al., "Kevin", arXiv:2507.11948). The estimator compares the returns of the members' t-th replies, as MT-GRPO
                  compares rewards of the same turn (Zeng et al., arXiv:2505.11821)
    last_turn     only the last reply is trained, with the advantage of the episode's reward

gamma is `algorithm.discount`. Replies are in the order of `Trajectory.turns`, the order of their requests. The rewards r_k are
`Trajectory.turn_rewards`. The episode's reward minus the sum of the r_k, such as a length penalty, is added to the last r_k.
So without `turn_rewards` the last reply has the whole reward, and with gamma = 1 the first return is the episode's reward.

Shapes: [G] has a value per member, [t] a value per reply of one member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from asyncrl.types import Trajectory

from .advantages import Estimator, Float64Array


def returns(trajectory: Trajectory, gamma: float) -> Float64Array | None:
    """[t] the return of each reply. None for a trajectory without a reward."""
    if trajectory.reward is None:
        return None
    rewards = np.zeros(1 if trajectory.turns is None else trajectory.turns.size)
    rewards[:] = trajectory.turn_rewards or 0.0
    rewards[-1] += trajectory.reward - rewards.sum()
    for turn in range(rewards.size - 2, -1, -1):
        rewards[turn] += gamma * rewards[turn + 1]
    # Rounding errors of the sums must not make equal returns differ.
    return rewards.round(12)


def turn_advantages(estimator: Estimator, trajectories: Sequence[Trajectory], gamma: float) -> list[Float64Array]:
    """G arrays [t]: the advantage of each reply. For each t the estimator compares the t-th replies of all members that have a t-th
    reply and a reward. A member without a reward has advantages of 0."""
    returns_G = [returns(trajectory, gamma) for trajectory in trajectories]
    advantages_G = [np.zeros(1 if trajectory.turns is None else trajectory.turns.size) for trajectory in trajectories]
    for turn in range(max((values.size for values in advantages_G), default=0)):
        compared = [None if values is None or turn >= values.size else float(values[turn]) for values in returns_G]
        for values, advantage in zip(advantages_G, estimator(compared), strict=True):
            if turn < values.size:
                values[turn] = advantage
    return advantages_G


def turn_of(trajectory: Trajectory, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the reply of each token, from 0. `tokens`: indices of sampled tokens in the trajectory."""
    return (
        np.zeros(tokens.size, np.int64)
        if trajectory.turns is None
        else trajectory.turns.searchsorted(tokens, "right") - 1
    )


def only_last_turn(trajectory: Trajectory) -> Trajectory:
    """The trajectory with only its last reply trained."""
    if trajectory.turns is None:
        return trajectory
    return replace(trajectory, mask=trajectory.mask & (np.arange(trajectory.mask.size) >= trajectory.turns[-1]))
