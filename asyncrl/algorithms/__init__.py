"""Losses, advantages, importance corrections and KL estimators: one pure, named function per published method.

    advantages.py   rewards of one group -> advantages (numpy only: importable where torch is not)
    base.py         what a loss takes and returns (sums, never means)
    importance.py   correction against the sampler's log-probs, and how far sampler and trainer are apart
    kl.py           per-token estimators of a KL divergence
    losses.py       the losses
    registry.py     names -> functions

This module imports nothing, so that `asyncrl.algorithms.advantages` costs a reward worker no torch import.
"""
