"""Methods in the configuration: what one class says reaches everything."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from asyncrl.algorithms import registry
from asyncrl.config.checks import SWITCHED
from asyncrl.config.describe import help_text, to_yaml
from asyncrl.config.fields import knobs, sections
from asyncrl.config.load import load_config
from asyncrl.config.methods import SETTINGS
from asyncrl.config.resolve import resolve
from asyncrl.errors import ConfigError


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
