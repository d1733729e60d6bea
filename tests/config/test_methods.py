"""Methods in the configuration: what the algorithm section refuses, with its reason and a way out, and what nothing reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from asyncrl.algorithms.registry import LOSSES
from asyncrl.config.checks import SWITCHED
from asyncrl.config.describe import help_text, to_yaml
from asyncrl.config.fields import config_fields, sections
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS
from asyncrl.config.resolve import resolve, warnings
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.types import Normaliser

BASE = ("engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1")
BY_TOKENS = sorted(name for name, loss in LOSSES.items() if loss.normaliser is Normaliser.TOKENS)


def made(*overrides: str) -> Config:
    return resolve(load_config([], [*BASE, *overrides]))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as found:
        made(*overrides)
    return str(found.value)


def test_a_local_denominator_is_refused_where_steps_are_streamed() -> None:
    text = refusal("algorithm.loss=bnpo")
    assert (
        "divides by the tokens of each microbatch" in text and "loss=dapo" in text and "rollout.streaming=false" in text
    )
    made("algorithm.loss=bnpo", "rollout.streaming=false")
    made("algorithm.loss=bnpo", "algorithm.updates_per_batch=2")  # such a batch is gathered whole


def test_an_all_rank_quantile_is_refused_where_steps_are_streamed() -> None:
    text = refusal("algorithm.top_entropy.quantile=0.2")
    assert "are not known before the first backward" in text and "rollout.streaming=false" in text
    made("algorithm.top_entropy.quantile=0.2", "preset=one_off")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_terms_with_different_normalisers_are_refused_where_steps_are_streamed(name: str) -> None:
    entropy = (f"algorithm.loss={name}", "algorithm.entropy.coef=0.01")
    if name in BY_TOKENS:
        made(*entropy)
        return
    text = refusal(*entropy)
    if name != "bnpo":
        assert "the bonus is divided by tokens" in text and f"the loss by {LOSSES[name].normaliser.value}" in text
        assert "rollout.streaming=false" in text and "dapo" in text
    made(*entropy, "preset=sync")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["clip.delta=1.1"], "expected more than 1 + epsilon_high = 1.2"),
        (["clip.delta=3", "clip.dual_clip=3"], "both set the same bound"),
        (["clip.delta=3", "loss=cispo"], "loss is cispo, which does not read it"),
        (["cispo.high=3"], "loss is grpo, which does not read it; use loss=cispo, or leave algorithm.cispo.high out"),
        (["loss=cispo", "clip.epsilon_high=5.0"], "the upper bound of cispo is algorithm.cispo.high"),
        (["loss=cispo", "cispo.low=6"], "expected less than algorithm.cispo.high = 5.0"),
        (["importance.floor=3"], "expected less than algorithm.importance.cap = 2.0"),
        (["importance.mode=icepop"], "this mode needs both bounds: set both (0.5 and 5.0"),
        (["importance.mode=sequence_mask_tis"], "0.999 and 1.002"),
        (["loss=vespo", "importance.mode=sequence_mask"], "use a mode of the token level"),
        (["loss=vespo", "importance.mode=geometric_truncate"], "use a mode of the token level"),
        (["old_logprobs=sampler", "importance.veto=1e-4"], "may be applied; set importance.veto=null"),
        (["old_logprobs=sampler", "importance.mode=sequence_mask"], "so there are no importance weights"),
        (["old_logprobs=sampler", "force_on_policy=true"], "leave one of the two out"),
        (["force_on_policy=true", "loss=cispo"], "bounds the ratio, and the ratio is always 1; use loss=reinforce"),
        (["force_on_policy=true", "loss=sapo"], "bounds the ratio, and the ratio is always 1; use loss=grpo"),
        (
            ["force_on_policy=true", "clip.epsilon=0.1"],
            "algorithm.clip.epsilon is 0.1 but algorithm.force_on_policy is true",
        ),
        (["force_on_policy=true", "clip.epsilon_high=0.3", "loss=dapo"], "algorithm.clip.epsilon_high is 0.3 but"),
        (["force_on_policy=true", "clip.dual_clip=3"], "the bound would do nothing"),
        (["kl.place=reward"], "algorithm.kl.place is reward but algorithm.kl.coef is 0"),
        (["kl.coef=0.1", "kl.place=reward", "kl.bias_correction=true"], "has no gradient to correct"),
        (["loss=sapo", "clip.epsilon=0.1"], "loss is sapo, which does not read it"),
        (
            ["sapo.temperature_pos=2"],
            "loss is grpo, which does not read it; use loss=sapo, or leave algorithm.sapo.temperature_pos out",
        ),
        (["kl.estimator=k1"], "algorithm.kl.coef is 0, so there is no KL; set algorithm.kl.coef, or"),
        (["importance.cap=null", "importance.mode=token_mask"], "there is no correction"),
        (["clip.epsilon=1"], "expected less than 1"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], words: str) -> None:
    assert words in refusal(*(f"algorithm.{override}" for override in overrides))


def test_a_configuration_with_a_forced_centre_is_resolved_to_itself() -> None:
    config = made("algorithm.force_on_policy=true")
    assert resolve(config) == config


def test_names_are_matched_without_case() -> None:
    algorithm = made(
        "algorithm.loss=DAPO", "algorithm.advantage=Dr-GRPO", "algorithm.kl.coef=0.1", "algorithm.kl.estimator=K3"
    ).algorithm
    assert (algorithm.loss, algorithm.advantage, algorithm.kl.estimator) == ("dapo", "dr_grpo", "k3")
    assert made("preset=Sync", "data.overlong=CUT").preset == "sync"
    assert "grpo" in refusal("algorithm.loss=GRPOO")


def test_kl_in_the_reward_needs_an_advantage_that_reads_the_reward() -> None:
    words = refusal("preset=sync", "algorithm.kl.coef=0.1", "algorithm.kl.place=reward", "algorithm.advantage=gdpo")
    assert "the KL would be lost" in words


def test_what_is_seldom_meant_is_warned_of() -> None:
    def found(*overrides: str) -> str:
        return "\n".join(warnings(made(*overrides)))

    assert "only adds noise" in found("algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1")
    assert "only adds noise" not in found(
        "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1", "algorithm.kl.bias_correction=true"
    )
    assert "hardly ever clips" in found("algorithm.loss=luspo")
    assert "nothing corrects" in found("algorithm.importance.cap=null")
    assert "nothing corrects" not in found("algorithm.importance.cap=null", "algorithm.importance.veto=1e-4")


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_resolved_configuration_is_read_back_and_resolved_to_itself(loss: str, tmp_path: Path) -> None:
    config = made("preset=sync", f"algorithm.loss={loss}")
    assert config.algorithm.loss == loss and resolve(config) == config
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert resolve(load_config([file])) == config == pickle.loads(pickle.dumps(config))


def test_every_method_lies_in_a_section_of_its_own() -> None:
    assert all(name in config_fields() for name in SETTINGS)
    assert all(section in sections() for section in SWITCHED)
    losses = [loss for loss in LOSSES.values() if loss.settings()]
    assert all(f"[algorithm.{loss.section}: settings of loss" in help_text() for loss in losses)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.alpha=4"], "model.lora.rank is 0"),
        (["reward.overlong.weight=2"], "reward.overlong.cache is not set"),
        (["rollout.filter.max_refills=2"], "no filter is on"),
        (["door.ring_mib=64"], "door.ring is not set"),
        (["door.http_key=0123456789abcdef"], "door.http_key is given but door.ring is not set"),  # a secret
        (["replay.max_age=2"], "replay.size is 0"),
        (["reroll.attempts=2"], "reroll.start_fraction is 1"),
        (["telemetry.profile.steps=2"], "telemetry.profile.from is not set"),
        (
            ["dry_run.finish_s=2", "engine.kind=embedded", "train.kind=torch"],
            "neither engine.kind nor train.kind is dry_run",
        ),
    ],
)
def test_settings_of_what_is_off_are_refused(overrides: list[str], words: str) -> None:
    said = refusal(*overrides)
    assert f"{overrides[0].partition('=')[0]} is" in said and words in said


def test_a_program_with_a_ring_of_its_own_has_the_settings_of_the_door() -> None:
    assert resolve(load_config([], [*BASE, "door.timeout_s=5"]), embedding=True).door.timeout_s == 5
