"""What the `algorithm` section must not say: numbers that contradict each other, that nothing reads, or that a streamed
step cannot honour. Every complaint names the value, the reason and the way out. No torch: the losses' own declarations
(normalisers, modes) are repeated here as names, and a test holds them equal to `algorithms.registry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.types import Normaliser

from .schema import STEP_ADVANTAGES, AlgorithmConfig

LOSS_NORMALISERS: Mapping[str, Normaliser] = {
    "grpo": Normaliser.SEQUENCES,
    "bnpo": Normaliser.MICROBATCHES,
    "dapo": Normaliser.TOKENS,
    "dr_grpo": Normaliser.SEQUENCES_X_MAX_LENGTH,
    "gspo": Normaliser.SEQUENCES,
    "cispo": Normaliser.TOKENS,
    "sapo": Normaliser.SEQUENCES,
    "luspo": Normaliser.SEQUENCES,
    "vespo": Normaliser.TOKENS,
    "reinforce": Normaliser.TOKENS,
    "ppo_clip": Normaliser.TOKENS,
    "one_sided": Normaliser.TOKENS,
}

_CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "luspo", "ppo_clip")
# knob -> losses that read it; with another loss a value of one's own would do nothing
READERS: Mapping[str, tuple[str, ...]] = {
    "delta": _CLIPPED,
    "dual_clip": _CLIPPED,
    "cispo_low": ("cispo",),
    "cispo_high": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}
_IMPORTANCE = ("importance_cap", "importance_floor", "importance_veto")


def has_bonus(algorithm: AlgorithmConfig) -> bool:
    """Whether there is an entropy bonus, in some step."""
    return algorithm.entropy_coef > 0 or algorithm.entropy_target is not None


def separate_entropy(algorithm: AlgorithmConfig) -> bool:
    """Whether the entropy bonus is divided by another number than the loss: it is a mean over tokens, always."""
    by_tokens = LOSS_NORMALISERS[algorithm.loss] is Normaliser.TOKENS
    return has_bonus(algorithm) and not by_tokens


def needs_second_buffer(algorithm: AlgorithmConfig) -> bool:
    """Whether the trainer allocates one: asked for, and there is a term that goes into it."""
    return algorithm.second_gradient_buffer and separate_entropy(algorithm) and algorithm.top_entropy_quantile == 1


def check_losses(algorithm: AlgorithmConfig, streaming: bool) -> Iterator[str]:
    """`streaming`: groups are trained as they arrive, before the step's number of tokens and sequences is known."""
    yield from _check_readers(algorithm)
    yield from _check_clips(algorithm)
    yield from _check_importance(algorithm)
    yield from _check_entropy(algorithm)
    yield from _check_kl(algorithm)
    if streaming:
        yield from _check_streaming(algorithm)


def _check_readers(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name, losses in READERS.items():
        value, default = getattr(algorithm, name), AlgorithmConfig.model_fields[name].default
        if value != default and algorithm.loss not in losses:
            yield (
                f"algorithm.{name} is {value} but loss is {algorithm.loss}, which does not read it; leave it out, or use "
                f"loss={' or '.join(losses)}"
            )
    own_high = algorithm.epsilon_high not in (None, algorithm.epsilon)
    if algorithm.loss in ("cispo", "sapo", "vespo", "reinforce") and own_high:
        yield (
            f"algorithm.epsilon_high is {algorithm.epsilon_high} but loss is {algorithm.loss}, which does not read it"
            + (
                "; the bound of its ratio is cispo_high (5.0 in the paper's reproductions)"
                * (algorithm.loss == "cispo")
            )
        )


def _check_clips(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.epsilon >= 1:
        yield (
            f"algorithm.epsilon is {algorithm.epsilon}; expected less than 1, since the ratio is clipped to 1 - "
            "epsilon below"
        )
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    if algorithm.delta is not None and algorithm.delta <= 1 + high:
        yield (
            f"algorithm.delta is {algorithm.delta}; expected more than 1 + epsilon_high = {1 + high}, or it would clip "
            "before the clip"
        )
    if algorithm.delta is not None and algorithm.dual_clip is not None:
        yield (
            f"algorithm.delta is {algorithm.delta} and dual_clip is {algorithm.dual_clip}: two spellings of one bound; set "
            "one of them"
        )
    if algorithm.loss == "cispo" and algorithm.cispo_low >= algorithm.cispo_high:
        yield f"algorithm.cispo_low is {algorithm.cispo_low}; expected less than cispo_high = {algorithm.cispo_high}"
    if algorithm.force_on_policy and algorithm.old_logprobs == "sampler":
        yield (
            "algorithm.force_on_policy is true but old_logprobs is sampler: one centres the clip on the training "
            "forward, the other on the sampler; choose one"
        )


def _check_importance(algorithm: AlgorithmConfig) -> Iterator[str]:
    mode, cap, floor = algorithm.importance_mode, algorithm.importance_cap, algorithm.importance_floor
    if algorithm.old_logprobs == "sampler":
        for name in _IMPORTANCE:
            value = getattr(algorithm, name)
            if name in algorithm.model_fields_set and value is not None:
                yield (
                    f"algorithm.{name} is {value} but old_logprobs is sampler: the two corrections are never applied "
                    f"together; set {name}=null or old_logprobs=recompute"
                )
        return
    if cap is not None and floor is not None and floor >= cap:
        yield f"algorithm.importance_floor is {floor}; expected less than importance_cap = {cap}"
    if mode in ("icepop", "sequence_mask_tis") and (cap is None or floor is None):
        example = "0.5 and 5.0" if mode == "icepop" else "0.999 and 1.002"
        yield (
            f"algorithm.importance_mode is {mode} with importance_floor={floor} and importance_cap={cap}; it masks on both "
            f"sides: set both ({example} are published values)"
        )
    if algorithm.loss == "vespo" and not mode.startswith(("token", "tis", "icepop")):
        yield (
            f"algorithm.importance_mode is {mode} but loss is vespo, which adds up the weights of a sequence's tokens "
            "itself; use a token mode"
        )


def _check_entropy(algorithm: AlgorithmConfig) -> Iterator[str]:
    target = algorithm.entropy_target
    if target is None:
        if algorithm.entropy_coef_delta != AlgorithmConfig.model_fields["entropy_coef_delta"].default:
            yield (
                f"algorithm.entropy_coef_delta is {algorithm.entropy_coef_delta} but entropy_target is not set: the coefficient "
                "of the bonus stands still; set entropy_target, or leave it out"
            )
    elif algorithm.entropy_coef > 1:
        yield (
            f"algorithm.entropy_coef is {algorithm.entropy_coef} with entropy_target {target}: a controlled coefficient stays "
            "within [0, 1]; begin inside"
        )


def _check_kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_in == "reward" and algorithm.use_bias_correction_kl:
        yield (
            "algorithm.use_bias_correction_kl is true but kl_in is reward: a penalty on the reward has no gradient to "
            "correct; leave it out or set kl_in=loss"
        )
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward" and algorithm.advantage == "gdpo":
        yield (
            "algorithm.kl_in is reward but advantage is gdpo, which reads the components and not their sum: the KL would be "
            "lost; set kl_in=loss or another advantage"
        )
    if algorithm.kl_coef == 0:
        for name in ("kl_in", "kl_clamp", "use_bias_correction_kl"):
            if getattr(algorithm, name) != AlgorithmConfig.model_fields[name].default:
                yield f"algorithm.{name} is set but kl_coef is 0: there is no KL; set kl_coef or leave it out"


def _check_streaming(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.advantage in STEP_ADVANTAGES:  # never quietly over whatever part of the step is there
        yield (
            f"algorithm.advantage is {algorithm.advantage}, whose statistics span the whole step, but rollout.streaming trains "
            "each group as it arrives, before the others are known; set rollout.streaming=false (preset one_off or sync), or use "
            "an estimator of the group: grpo, dr_grpo, rloo"
        )
    if LOSS_NORMALISERS[algorithm.loss] is Normaliser.MICROBATCHES:
        yield (
            f"algorithm.loss is {algorithm.loss} but steps are streamed: it divides by the tokens of each microbatch, so the "
            "gradient would depend on which groups happened to arrive together; use loss=dapo (one denominator for the "
            "whole step), or rollout.streaming=false"
        )
    if algorithm.top_entropy_quantile < 1:
        yield (
            f"algorithm.top_entropy_quantile is {algorithm.top_entropy_quantile} but steps are streamed: which tokens are "
            "on top is known only when all tokens of the step on all ranks are; use rollout.streaming=false, or "
            "top_entropy_quantile=1"
        )
    if separate_entropy(algorithm) and not algorithm.second_gradient_buffer:
        by_tokens = ", ".join(name for name, kind in LOSS_NORMALISERS.items() if kind is Normaliser.TOKENS)
        yield (
            f"algorithm.{_bonus(algorithm)} with loss {algorithm.loss} but steps are streamed: the "
            f"bonus is divided by tokens, the loss by {LOSS_NORMALISERS[algorithm.loss].value}, and neither number is known "
            "while gradients add up; use second_gradient_buffer=true (a second buffer of the gradient's size, and a second "
            f"backward pass), a loss that is divided by tokens ({by_tokens}), or rollout.streaming=false"
        )


def warn_algorithm(algorithm: AlgorithmConfig, staleness_bound: int) -> list[str]:
    """What is allowed but seldom meant. Takes the section as resolved."""
    found = []
    if algorithm.loss in ("gspo", "luspo") and algorithm.epsilon > 0.05:
        found.append(
            f"algorithm.epsilon={algorithm.epsilon} with loss {algorithm.loss}: its ratios are means over a sequence and "
            "stay near 1, so this never clips; the paper of gspo uses 3e-4 (and 4e-4 above)"
        )
    corrected = any(getattr(algorithm, name) is not None for name in _IMPORTANCE) or algorithm.old_logprobs == "sampler"
    if not corrected and staleness_bound > 0:
        found.append(
            f"algorithm.importance_cap=null with tokens up to {staleness_bound} versions old: nothing corrects the "
            "difference between sampler and trainer; set importance_cap=2.0 or old_logprobs=sampler"
        )
    k1_in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1"
    if k1_in_loss and not algorithm.use_bias_correction_kl:
        found.append(
            "algorithm.kl_estimator=k1 in the loss: the mean of its gradient is 0, it only adds noise; use k2, k3, "
            "use_bias_correction_kl=true, or kl_in=reward"
        )
    if algorithm.second_gradient_buffer and not separate_entropy(algorithm):
        found.append(
            f"algorithm.second_gradient_buffer=true with loss {algorithm.loss} and entropy_coef={algorithm.entropy_coef}: no "
            "term needs it, none is allocated"
        )
    return found


def _bonus(algorithm: AlgorithmConfig) -> str:
    target = algorithm.entropy_target
    return f"entropy_coef is {algorithm.entropy_coef}" if target is None else f"entropy_target is {target}"
