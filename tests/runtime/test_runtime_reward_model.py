"""Reward models in whole runs, as the documentation writes them: a small random classifier on disk, and a module by its address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runtime_helpers import MODEL, REAL, metrics_of, rollouts_of, write_yaml
from runtime_model import LETTERS, made, make_tokenizer
from support.pages import blocks

from asyncrl.config.schema_rollouts import RewardModelConfig
from asyncrl.main import main
from asyncrl.models.reward_model import load_reward_model

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `my/classifier` and `rewards.py`."""
    monkeypatch.chdir(tmp_path)
    settings = {"num_hidden_layers": 2, "num_labels": 1, "initializer_range": 0.3}
    model, tokenizer = made("Qwen2", 5, "ForSequenceClassification", **settings)
    tokenizer.chat_template = TEMPLATE
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "my/classifier")
    (tmp_path / "rewards.py").write_text(
        "def short(completions, **columns):\n    return [-float(len(c)) for c in completions]\n"
    )
    return tmp_path


def documented() -> dict[str, Any]:
    """The example of the page."""
    [block] = blocks("reward model")
    return dict(yaml.safe_load(block.text))


def run(here: Path, *overrides: str, **sections: Any) -> int:
    tree = REAL | {"preset": "sync"} | sections
    return main([str(write_yaml(here, tree)), *overrides])


def test_the_documented_example_trains_on_what_the_classifier_says(here: Path) -> None:
    assert run(here, **documented()) == 0
    lines, rows = metrics_of(here / "runs/run"), rollouts_of(here / "runs/run")
    assert len(lines) == 3 and len(rows) == 3 * 16
    judge = load_reward_model(RewardModelConfig(path="my/classifier"), "float32", CPU, 128)
    for row in rows:
        # In the run, sixteen or so were beside it.
        [alone] = judge.scores([judge.tokenize(row["prompt"], row["completion"])])
        assert row["components"]["classifier"] == pytest.approx(alone, rel=1e-4, abs=1e-5)
        assert row["reward"] == pytest.approx(alone - 0.1 * len(row["completion"]), rel=1e-4, abs=1e-4)
    for number, line in enumerate(lines):
        scores = [row["components"]["classifier"] for row in rows[number * 16 : number * 16 + 16]]
        assert line["reward/classifier/mean"] == pytest.approx(sum(scores) / 16) and line["reward/classifier/std"] > 0
        assert line["optim/grad_norm"] > 0 and line["time/reward"] > 0


def test_a_model_alone_evaluates_and_trains_without_any_reward_function(here: Path) -> None:
    data = REAL["data"] | {"eval": f"{MODEL}:held_out"}
    assert run(here, "preset=async", "evaluate.every=2", reward={"model": f"{__file__}:vowels"}, data=data) == 0
    lines = metrics_of(here / "runs/run")
    assert any("eval/single_turn/vowels/mean" in line for line in lines)
    for row in rollouts_of(here / "runs/run"):
        said = re.sub("<pad>|<eos>", "", row["completion"])  # tokens, and no letters to the model
        assert row["reward"] == pytest.approx(sum(letter in "ae" for letter in row["prompt"] + said))


def vowels(seed: int) -> tuple[torch.nn.Module, Any]:
    """A module of one's own: how often a text says a or e."""

    class Vowels(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = [float(token in ("a", "e")) for token in ("<pad>", "<eos>", *LETTERS)] + [0.0] * 13
            self.values = torch.nn.Parameter(torch.tensor(values))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (self.values[input_ids] * attention_mask).sum(1)

    return Vowels(), make_tokenizer()


def test_a_text_that_is_too_long_ends_the_run_or_is_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"model": {"path": "my/classifier", "max_tokens": 12}}
    assert run(here, reward=short) == 6
    assert "texts are never cut" in capsys.readouterr().err
    assert run(here, "run.overwrite=true", reward=short | {"on_error": "none"}) == 0
    line = metrics_of(here / "runs/run")[0]
    assert 0 < line["reward/classifier/errors"] < 16
    assert line["reward/classifier/applicable"] == 1 - line["reward/classifier/errors"] / 16


def test_what_is_no_reward_model_ends_the_run_before_it_starts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(here, reward={"model": "nobody/nothing/nowhere"}) == 2
    assert "reward.model: there is no directory 'nobody/nothing/nowhere'" in capsys.readouterr().err
    (here / "empty").mkdir()
    assert run(here, reward={"model": "./empty"}) == 2
    assert "reward.model: no model configuration" in capsys.readouterr().err


def test_the_plan_shows_its_memory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(here, "--dry-run", **documented()) == 0
    assert "reward_models" in capsys.readouterr().out.split()
