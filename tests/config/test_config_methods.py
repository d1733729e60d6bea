"""Methods in the configuration: what one class says reaches everything, and every spelling works."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.algorithms import registry
from asyncrl.config.check_unread import SWITCHED
from asyncrl.config.describe import help_text, to_yaml
from asyncrl.config.fields import get, knobs, sections
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS, numbers
from asyncrl.config.old_names import SPELLINGS
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

# What a run of an earlier version wrote: every setting, with what was derived, for a loss that reads few of them.
WRITTEN = """
preset: async
rollout: {max_staleness: 2, prefetch_depth: null, dynamic_sampling: false, min_mean_reward: null, max_mean_reward: null,
  filter_by: reward, max_refills: 8}
reward: {overlong_cache: null, overlong_weight: 1.0}
algorithm: {loss: sapo, epsilon: 0.2, epsilon_high: 0.2, delta: null, dual_clip: null, cispo_low: 0.0, cispo_high: 5.0,
  sapo_temperature_pos: 1.5, sapo_temperature_neg: 1.05, vespo_k_pos: 2.0, vespo_lambda_pos: 3.0, vespo_k_neg: 3.0,
  vespo_lambda_neg: 2.0, positive_scale: 1.0, negative_scale: 1.0, importance_mode: token_truncate, importance_cap: 2.0,
  importance_floor: null, importance_veto: null, importance_log_clamp: null, off_policy_mask_threshold: null,
  mask_truncated: false, mask_longer_than: null, kl_coef: 0.0, kl_estimator: k3, kl_in: loss, kl_clamp: null,
  use_bias_correction_kl: false, entropy_coef: 0.0, entropy_target: null, entropy_coef_delta: 0.005,
  top_entropy_quantile: 1.0, second_gradient_buffer: false, reference_ahead: true}
engine: {kind: dry_run}
train: {kind: dry_run, max_steps: 1}
"""


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    script = Path(__file__).with_name("config_toy.py")
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_class_is_in_help_explain_and_the_run(toy: dict[str, Any]) -> None:
    assert "algorithm.toy.strength  (a number > 0 and <= 8; default 2.0)\n    How much of it." in toy["help"]
    assert "[algorithm.toy: settings of loss toy; refused with another]" in toy["help"]
    assert (
        "algorithm.toy.kind  (one of plain, fancy; default plain)" in toy["help"] and "one_sided, toy;" in toy["help"]
    )
    assert "[algorithm.shifted: settings of advantage shifted; refused with another]" in toy["help"]
    for words in ("loss toy", "-strength A_t r_t", "settings of its own, algorithm.toy.*: strength=2.0, kind=plain"):
        assert words in toy["explain"]
    for words in (
        "needs: old log-probs, where a batch has several updates, reference log-probs",
        "which wants every token",
    ):
        assert words in toy["explain"]
    assert "also written: algorithm.toy_strength" in toy["explain"] and "algorithm.shifted.*: by=0.5" in toy["explain"]
    assert "strength: 3.0" in toy["yaml"] and toy["own"]


def test_one_class_is_trained_with_its_numbers(toy: dict[str, Any]) -> None:
    assert toy["total"] == -12.0  # four tokens, strength 3
    assert toy["needs"] == [True, True, False]
    assert toy["advantages"] == [0.0, 2.0]


def test_one_class_is_refused_where_it_says_so(toy: dict[str, Any]) -> None:
    refusals = toy["refusals"]
    assert "algorithm.toy.strength is 9" in refusals["bound"] and "<= 8" in refusals["bound"]
    assert "one of plain, fancy" in refusals["choice"]
    assert refusals["problem"] == "algorithm.toy.strength is 5.0; too fancy"
    assert refusals["conflict"] == "algorithm.mask.truncated is true but algorithm.loss is toy, which wants every token"
    assert refusals["unread"].endswith("loss is dapo, which does not read it; leave it out, or use loss=toy")
    assert "loss is toy, which does not read it" in refusals["clip"]
    assert refusals["advantage"].endswith(
        "advantage is grpo, which does not read it; leave it out, or use advantage=shifted"
    )
    assert toy["resume"][0] is None and "another objective" in toy["resume"][1]


def another(name: str) -> Any:
    """A value that is allowed and not the default."""
    knob = knobs()[name]
    if knob.takes_bool:
        return not knob.default
    if knob.choices:
        return next(choice for choice in knob.choices if choice != knob.default)
    if knob.takes_text:
        return "share"
    return 3 if "integer" in knob.expected or "> 1" in knob.expected else 0.5


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_other_spelling_means_the_setting(spelling: str) -> None:
    name = SPELLINGS[spelling]
    value = another(name)
    section, _, key = spelling.partition(".")
    typed = load_config([], [f"{spelling}={str(value).lower() if isinstance(value, bool) else value}"])
    assert get(typed, name) == value == get(Config.model_validate({section: {key: value}}), name)
    assert typed == load_config([], [f"{name}={str(value).lower() if isinstance(value, bool) else value}"])
    assert spelling not in knobs()


def test_two_spellings_of_one_setting_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("algorithm: {kl_coef: 0.1, kl: {coef: 0.2}}\n")
    with pytest.raises(
        ConfigError, match=r"x\.yaml: algorithm\.kl_coef is 0\.1 and algorithm\.kl\.coef is 0\.2: they are two"
    ):
        load_config([file])
    with pytest.raises(ConfigError, match="two names of one setting"):
        load_config([], ["algorithm.kl_coef=0.1", "algorithm.kl.coef=0.2"])
    file.write_text("algorithm: {kl_coef: 0.1}\n")
    assert load_config([file], ["algorithm.kl.coef=0.2"]).algorithm.kl.coef == 0.2  # later wins, whatever the spelling
    file.write_text("algorithm:\n  kl_coef: -1\n")
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef is -1 \(.*x\.yaml line 2\)"):
        load_config([file])


def test_what_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(WRITTEN)
    config = resolve(load_config([file]))
    assert numbers(config.algorithm)["sapo_temperature_pos"] == 1.5 and config.rollout.max_staleness == 2
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert resolve(load_config([again])) == config


@pytest.mark.parametrize("loss", sorted(registry.LOSSES))
def test_a_resolved_configuration_is_read_back_and_resolved_to_itself(loss: str, tmp_path: Path) -> None:
    base = ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1", "preset=sync", f"algorithm.loss={loss}"]
    config = resolve(load_config([], base))
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert resolve(load_config([file])) == config == pickle.loads(pickle.dumps(config))


def test_every_method_lies_in_a_section_of_its_own() -> None:
    assert all(name in knobs() for name in SETTINGS)
    assert all(section in sections() for section in SWITCHED)
    losses = [loss for loss in registry.LOSSES.values() if loss.settings()]
    assert all(f"[algorithm.{loss.section}: settings of loss" in help_text() for loss in losses)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.alpha=4"], "model.lora.rank is 0"),
        (["reward.overlong.weight=2"], "reward.overlong.cache is not set"),
        (["rollout.filter.max_refills=2"], "no filter is on"),
        (["door.ring_mib=64"], "door.ring is not set"),
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
    with pytest.raises(ConfigError) as found:
        resolve(load_config([], ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1", *overrides]))
    assert f"{overrides[0].partition('=')[0]} is" in str(found.value) and words in str(found.value)


def test_a_program_with_a_ring_of_its_own_has_the_settings_of_the_door() -> None:
    base = ["engine.kind=dry_run", "train.kind=dry_run", "train.max_steps=1", "door.timeout_s=5"]
    assert resolve(load_config([], base), embedding=True).door.timeout_s == 5
