"""Whole runs with adapters: they learn, their checkpoints load, and they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import REAL, config_of, equal_weights, metrics_of, weights_of
from runtime_model import build
from transformers import AutoModelForCausalLM

from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.runtime.runtime import Runtime

LORA: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": REAL["model"] | {"lora": {"rank": 4, "alpha": 8}},
    "train": REAL["train"] | {"max_steps": 6},
    "algorithm": {"kl": {"coef": 0.01}},
    "checkpoint": {"every": 3, "keep": 0},
    "telemetry": {"live": "off", "trace": False, "report": False},
}
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def config_in(folder: Path, *overrides: str) -> Config:
    folder.mkdir(exist_ok=True)
    return config_of(folder, *overrides, base=LORA)


async def run(folder: Path, *overrides: str) -> None:
    async with Runtime(config_in(folder, *overrides)) as runtime:
        await runtime.run()


async def test_run_checkpoint_and_resume(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    await run(tmp_path / "whole")
    await run(tmp_path / "parts", "train.max_steps=3")
    await run(tmp_path / "parts", "resume=true")
    whole, parts = tmp_path / "whole/runs/run", tmp_path / "parts/runs/run"
    assert equal_weights(weights_of(whole, 6), weights_of(parts, 6))
    assert [line["reward/mean"] for line in metrics_of(whole)] == [line["reward/mean"] for line in metrics_of(parts)]
    # the sampler's log-probs, of merged weights, are the trainer's (largest difference, in nats)
    assert all(line["mismatch/current_max"] < 1e-4 for line in metrics_of(whole))

    step = whole / "checkpoints/step_6"
    base = build(0)[0]
    start = {name: p.clone() for name, p in base.named_parameters()}
    merged = AutoModelForCausalLM.from_pretrained(step)
    adapted = peft.PeftModel.from_pretrained(base, step / "adapter")
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=1e-4)
    for name, parameter in merged.named_parameters():  # what was not to be trained is as it was
        assert torch.equal(parameter, start[name]) == ("_proj" not in name), name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dropout=0.1"], r"model\.lora\.dropout is 0\.1; expected 0"),
        (["target_modules=[all-linear,q_proj]"], "expected all-linear alone"),
    ],
)
def test_dropout_and_mixed_targets_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    config = config_of(tmp_path, *(f"model.lora.{text}" for text in overrides), base=LORA)
    with pytest.raises(ConfigError, match=words):
        resolve(config)
