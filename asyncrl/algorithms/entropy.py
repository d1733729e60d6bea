"""The entropy bonus: a term of its own with a normaliser of its own.

Shape legend: S scored tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.types import Normaliser

from .base import LossInputs
from .entropy_control import COEFFICIENT_MAX, EntropyControl
from .method import Around, Method, setting

if TYPE_CHECKING:
    from torch import Tensor

    from .losses.loss import LossMethod


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Tensor:
    """`-coefficient x sum_t H_t`, differentiable; H_t is the entropy of the policy at token t, in nats, at the sampling
    temperature.

    Mnih et al. (arXiv:1602.01783), section 4. Normaliser: TOKENS, whatever that of the loss (as in TRL), so that the
    coefficient means the same with every loss; with a top-entropy mask, the tokens that it keeps. TRL takes the mean
    over each microbatch, so there its value depends on the split; here it is the mean over the step.
    """
    if inputs.entropy_S is None:
        raise ValueError(f"entropy_coef is {coefficient}, but the microbatch has no entropies (`entropy_S`)")
    entropy_S = inputs.entropy_S
    if inputs.keep_S is not None:
        entropy_S = entropy_S.masked_fill(~inputs.keep_S, 0.0)
    return -coefficient * entropy_S.sum()


@dataclass(frozen=True)
class Entropy(Method):
    """The entropy bonus, with a coefficient that stands still or follows a target."""

    section: ClassVar[str] = "entropy"
    switches: ClassVar[tuple[str, ...]] = ("coef", "target")
    off: ClassVar[str] = "algorithm.entropy.coef is 0 and target is not set: there is no bonus; set one of them"
    formula: ClassVar[Any] = entropy_bonus
    coef: float = setting(0.0, "Coefficient of the entropy bonus: a mean over tokens, whatever the loss.", ge=0)
    target: float | None = setting(
        None,
        "Adaptive entropy: coef is where the coefficient begins; it grows while the mean entropy of a step (nats) is at most "
        "this and shrinks otherwise, within [0, 1], and the bonus acts only below the target. TRL: 0.2.",
        gt=0,
    )
    coef_delta: float = setting(0.005, "By how much that coefficient moves per optimizer step.", gt=0, le=1)
    second_gradient_buffer: bool = setting(
        False,
        "Streamed steps with a bonus that is not divided by the same number as the loss: gather its gradient in a buffer of "
        "its own, with a second backward pass.",
        flat="second_gradient_buffer",
    )

    @property
    def on(self) -> bool:
        """Whether there is a bonus, in some step."""
        return self.coef > 0 or self.target is not None

    @property
    def control(self) -> EntropyControl | None:
        """How the coefficient begins, where it is controlled."""
        return None if self.target is None else EntropyControl(self.coef, self.target, self.coef_delta)

    def apart(self, loss: type[LossMethod] | LossMethod) -> bool:
        """Whether the bonus is divided by another number than this loss."""
        return self.on and loss.normaliser is not Normaliser.TOKENS

    def problems(self, around: Around) -> Iterator[str]:
        """Refused: `coef_delta` without a target, a controlled coefficient above 1, and a bonus in a streamed step that is
        divided by another number than the loss, without a second buffer."""
        default = {each.name: each.default for each in self.settings()}["coef_delta"]
        if self.target is None and self.coef_delta != default:
            yield (
                f"algorithm.entropy.coef_delta is {self.coef_delta} but entropy.target is not set: the coefficient of the "
                "bonus stands still; set entropy.target, or leave it out"
            )
        if self.target is not None and self.coef > COEFFICIENT_MAX:
            yield (
                f"algorithm.entropy.coef is {self.coef} with entropy.target {self.target}: a controlled coefficient stays "
                "within [0, 1]; begin inside"
            )
        if around.streaming and self.apart(around.loss) and not self.second_gradient_buffer:
            given = f"coef is {self.coef}" if self.target is None else f"target is {self.target}"
            yield (
                f"algorithm.entropy.{given} with loss {around.loss.name} but steps are streamed: the bonus is divided by "
                f"tokens, the loss by {around.loss.normaliser.value}, and neither number is known while gradients add up; use "
                "entropy.second_gradient_buffer=true (a second buffer of the gradient's size, and a second backward pass), a "
                f"loss that is divided by tokens ({', '.join(around.by_tokens)}), or rollout.streaming=false"
            )

    def warnings(self, around: Around) -> Iterator[str]:
        """Warned of: a second gradient buffer that no term needs."""
        if self.second_gradient_buffer and not self.apart(around.loss):
            yield (
                f"algorithm.entropy.second_gradient_buffer=true with loss {around.loss.name} and entropy.coef={self.coef}: no "
                "term needs it, none is allocated"
            )
