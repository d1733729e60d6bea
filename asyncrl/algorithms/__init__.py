"""Losses, advantages, importance corrections and KL estimators: each published method in one place, with all that is said of it.

    losses/         one class a loss: maths, settings, normaliser, needs, conflicts, paper
    advantages.py   rewards of one group, or of a step -> advantages (numpy only)
    terms.py        what every loss may have, in its order: corrections, masks, the KL
    importance.py   correction against the sampler's log-probs, and how far sampler and trainer are apart
    kl.py           per-token estimators of a KL divergence, in the loss or in the reward
    masks.py        what takes tokens out of the surrogate, and out of the loss
    entropy.py      the entropy bonus
    method.py       how a method declares its settings and what it cannot be combined with
    estimator.py    what an advantage is
    base.py         what a loss takes and returns (sums, never means)
    ratios.py       policy against old log-probs: per token, per sequence
    registry.py     names -> methods, and a method bound to its numbers

No module of this room imports torch when it is imported: the configuration is made of what the methods declare, and a reward worker
takes advantages, without it. The maths are methods of the tensors that they are given.
"""
