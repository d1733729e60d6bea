"""The losses, one class each in a file of its own. Adding one is writing that file and its line in `ALL`.

A loss is a ratio (`ratios.py`) in a surrogate (the class), the terms that every loss may have (`terms.py`), and a sum over the
microbatch. The trainer divides once, at finish, by the true number of the loss's `normaliser` over the whole step. Nothing in
here depends on how a step was cut into microbatches, except in `bnpo`, which is therefore refused where steps are streamed.

    loss.py     what a loss declares; start here
    clip.py     PPO's clip, the base of eight of them
"""

from __future__ import annotations

from .bnpo import Bnpo
from .cispo import Cispo
from .dapo import Dapo
from .dr_grpo import DrGrpo
from .grpo import Grpo
from .gspo import Gspo
from .loss import LossMethod
from .luspo import Luspo
from .one_sided import OneSided
from .ppo_clip import PpoClip
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
