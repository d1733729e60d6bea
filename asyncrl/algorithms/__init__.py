"""Losses, advantages, importance corrections and KL estimators: each published method in one place, with all that is said of it.

    losses.py       one class a loss: maths, settings, normaliser, needs, conflicts, paper
    advantages.py   rewards of one group, or of a step -> advantages (numpy only)
    terms.py        what every loss may have, in its order: corrections, masks, the KL, the entropy bonus
    importance.py   correction against the sampler's log-probs, and how far sampler and trainer are apart
    kl.py           per-token estimators of a KL divergence, in the loss or in the reward
    method.py       how a method declares its settings and what it cannot be combined with
    base.py         what a loss takes and returns (sums, never means); policy against old log-probs
    registry.py     names -> methods, and a method bound to its numbers

No module of this room imports torch when it is imported: the configuration is made of what the methods declare, and a reward worker
takes advantages, without it. The maths are methods of the tensors that they are given.
"""
