"""Methods in the configuration: what one class says reaches everything."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.algorithms import registry
from asyncrl.config.checks import SWITCHED
from asyncrl.config.describe import help_text, to_yaml
from asyncrl.config.fields import knobs, sections
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS
from asyncrl.config.resolve import resolve
from asyncrl.errors import ConfigError


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
    assert "algorithm.shifted.*: by=0.5" in toy["explain"] and "strength: 3.0" in toy["yaml"]


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
    assert refusals["unread"].endswith("loss is dapo, which does not read it; use loss=toy, or leave it out")
    assert "loss is toy, which does not read it" in refusals["clip"]
    assert refusals["advantage"].endswith(
        "advantage is grpo, which does not read it; use advantage=shifted, or leave it out"
    )
    assert toy["resume"][0] is None and "another objective" in toy["resume"][1]


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
