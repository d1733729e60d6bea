"""Losses, advantages, importance corrections and KL estimators: one pure, named function per published method.

    advantages.py   rewards of one group -> advantages (numpy only: importable where torch is not)
    base.py         what a loss takes and returns (sums, never means)
    numbers.py      the numbers of a loss, under the names of the configuration
    ratios.py       policy against old log-probs: per token, per sequence
    surrogates.py   ratio and advantage -> loss per token
    importance.py   correction against the sampler's log-probs, and how far sampler and trainer are apart
    masks.py        what takes tokens out of the surrogate, and out of the loss
    kl.py           per-token estimators of a KL divergence, in the loss or in the reward
    entropy.py      the entropy bonus
    losses.py       the losses, composed of the above
    registry.py     names -> functions

This module imports nothing, so that `asyncrl.algorithms.advantages` costs a reward worker no torch import.
"""
