"""The losses, one class each; those with PPO's clip stand in one file. Adding one is writing its class and its line in `ALL`.

A loss is a ratio (`ratios.py`) in a surrogate (the class), the terms that every loss may have (`terms.py`), and a sum over the
microbatch. The trainer divides once, at finish, by the true number of the loss's `normaliser` over the whole step. Nothing in
here depends on how a step was cut into microbatches, except in `bnpo`, which is therefore refused where steps are streamed.

    loss.py     what a loss declares; start here
    clip.py     PPO's clip, and the eight losses that it is the base of
"""

from __future__ import annotations

from .cispo import Cispo
from .clip import Bnpo, Dapo, DrGrpo, Grpo, Gspo, Luspo, OneSided, PpoClip
from .loss import LossMethod
from .reinforce import Reinforce
from .sapo import Sapo
from .vespo import Vespo

ALL: tuple[type[LossMethod], ...] = (
    Grpo,
    Bnpo,
    Dapo,
    DrGrpo,
    Gspo,
    Cispo,
    Sapo,
    Luspo,
    Vespo,
    Reinforce,
    PpoClip,
    OneSided,
)
