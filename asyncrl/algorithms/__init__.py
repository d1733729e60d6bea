"""Losses, advantages, importance corrections and KL estimators, each with its formula, paper, settings and conflicts.

    losses.py       the losses, a class each
    advantages.py   the advantage estimators: from rewards of a group, or of a step, to advantages (numpy only)
    credit.py       which reward each reply of an episode gets, and which replies are trained
    terms.py        terms that can be added to every loss: corrections, masks, KL, entropy bonus
    importance.py   the correction against the sampler's log-probs, and the mismatch between sampler and trainer
    kl.py           estimators of a KL divergence per token, in the loss or in the reward
    method.py       declarations of settings and conflicts, which the configuration reads
    base.py         input and output of a loss: columns per token, and sums
    registry.py     finds a loss or an advantage estimator by its name, and binds it to the values of its settings

The configuration and the reward workers use these modules in processes without torch. So no module imports torch at the top. The
formulas use methods of the tensors in the arguments.
"""
