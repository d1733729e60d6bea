"""A loss and an advantage of one class each, in a process of their own: what the rest of the house makes of them, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncrl.algorithms import advantages, losses
from asyncrl.algorithms.advantages import Float64Array, Rewards, as_rewards, of_group
from asyncrl.algorithms.base import LossInputs, token_ratio
from asyncrl.algorithms.losses import LossMethod, Surrogate
from asyncrl.algorithms.method import Around, Conflict, Method, setting
from asyncrl.types import Normaliser


@dataclass(frozen=True)
class Toy(LossMethod):
    """A loss for this test.

    Paper: none. Formula: `sum_t -strength A_t r_t`.
    """

    name: ClassVar[str] = "toy"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    needs_reference: ClassVar[bool] = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "algorithm.mask.truncated", "which wants every token", when=lambda a: a.at("algorithm.mask.truncated")
        ),
    )
    strength: float = setting(2.0, "How much of it.", gt=0, le=8)
    kind: str = setting("plain", "Which of them.", choices=("plain", "fancy"), fixed=True)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        ratio_S = token_ratio(inputs)
        return Surrogate(-self.strength * inputs.advantage_S * ratio_S, ratio_S)

    def problems(self, around: Around) -> Iterator[str]:
        if self.kind == "fancy" and self.strength > 4:
            yield f"algorithm.toy.strength is {self.strength}; too fancy"


@dataclass(frozen=True)
class ShiftSettings(Method):
    section: ClassVar[str] = "shifted"
    by: float = setting(0.5, "What is taken off a reward.")


@of_group(alone=True, settings=ShiftSettings)
def shifted(rewards_G: Rewards, own: ShiftSettings) -> Float64Array:
    """`r - by`."""
    return as_rewards(rewards_G) - own.by


losses.ALL += (Toy,)
advantages.ALL += (shifted,)


def report() -> dict[str, Any]:
    import torch

    from asyncrl.algorithms.registry import build_advantage, build_loss
    from asyncrl.cli.explain import explain
    from asyncrl.config.check_losses import needs_reference
    from asyncrl.config.describe import help_text, refusal, to_yaml
    from asyncrl.config.load import load_config
    from asyncrl.config.methods import numbers
    from asyncrl.config.resolve import resolve
    from asyncrl.errors import ConfigError

    def made(*overrides: str) -> Any:
        base = ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1"]
        return resolve(load_config([], [*base, *(f"algorithm.{each}" for each in overrides)]))

    def refused(*overrides: str) -> str:
        try:
            made(*overrides)
        except ConfigError as error:
            return str(error)
        return ""

    config = made("loss=toy", "toy.strength=3", "advantage=shifted", "shifted.by=1")
    ones_S = torch.ones(4, dtype=torch.float64)
    inputs = LossInputs(-ones_S, None, -ones_S, ones_S, torch.zeros(4, dtype=torch.int64), 1)
    loss = build_loss("toy", **numbers(config.algorithm))
    return {
        "help": help_text(),
        "explain": explain("toy") + explain("toy_strength") + explain("shifted"),
        "yaml": to_yaml(config),
        "total": float(loss(inputs).total),
        "needs": [loss.needs_reference, needs_reference(config.algorithm), needs_reference(made().algorithm)],
        "advantages": build_advantage("shifted", **numbers(config.algorithm))([1.0, 3.0]).tolist(),
        "resume": [refusal("algorithm.toy.strength"), refusal("algorithm.toy.kind")],
        "refusals": {
            "bound": refused("loss=toy", "toy.strength=9"),
            "choice": refused("loss=toy", "toy.kind=other"),
            "problem": refused("loss=toy", "toy.strength=5", "toy.kind=fancy"),
            "conflict": refused("loss=toy", "mask.truncated=true"),
            "unread": refused("loss=dapo", "toy.strength=3"),
            "clip": refused("loss=toy", "clip.epsilon=0.1"),
            "advantage": refused("shifted.by=1"),
        },
    }


if __name__ == "__main__":
    print(json.dumps(report()))
