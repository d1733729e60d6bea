"""`asyncrl explain`: formula, normaliser, paper and defaults of everything that has a name."""

from __future__ import annotations

import pytest

from asyncrl.algorithms.importance import IMPORTANCE_MODES
from asyncrl.algorithms.registry import ADVANTAGES, LOSSES
from asyncrl.cli.app import main
from asyncrl.cli.explain import explain, known
from asyncrl.config.fields import knobs, sections
from asyncrl.config.other_names import OTHER_NAMES


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_formula_paper_and_normaliser(name: str) -> None:
    text = explain(name)
    assert f"loss {name}" in text and "Formula:" in text and ("Paper:" in text or "Source:" in text)
    assert f"divided by: {LOSSES[name].normaliser.value}" in text


def test_every_name_is_explained() -> None:
    for name in (*ADVANTAGES, *IMPORTANCE_MODES, *known(), *knobs()):
        assert len(explain(name)) > 40, name


def test_settings_show_default_interactions_and_formula() -> None:
    text = explain("algorithm.importance.floor")
    assert "default null" in text and "geometric  exp(sum_t d_t" in text and "may change" in text
    assert "(a list, each item a string; default [all-linear])" in explain("model.lora.target_modules")
    assert "read by: cispo; refused with another loss" in explain("cispo_high")
    assert "eq. 9" in explain("off_policy_mask_threshold")
    assert "loss grpo" in explain("grpo") and "advantage grpo" in explain("grpo")
    assert "settings of its own, algorithm.sapo.*: temperature_pos=1.0" in explain("sapo")


def test_an_unknown_name_exits_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "drgrpo"]) == 2
    assert "did you mean 'dr_grpo'?" in capsys.readouterr().err
    assert main(["explain", "train.lr", "dapo"]) == 0
    out = capsys.readouterr().out
    assert "Peak learning rate" in out and "2503.14476" in out
    assert main(["explain"]) == 2 and main(["explain", "--help"]) == 0


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("steps_per_generation", "algorithm.minibatches"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("beta", "algorithm.kl.coef"),
        ("report_to", "telemetry.sinks"),
    ],
)
def test_a_name_of_another_code_base_is_explained(capsys: pytest.CaptureFixture[str], name: str, ours: str) -> None:
    """As the complaint about an unknown setting names it."""
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}, as other code bases call it, is {ours} here.\n\nsetting {ours}  (")


def test_every_name_of_another_code_base_is_explained() -> None:
    for ours in set(OTHER_NAMES.values()):
        assert explain(ours) or ours in sections(), ours


def test_what_is_not_here_is_explained_by_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "vllm_tensor_parallel_size"]) == 0
    assert "no engine is cut over devices" in capsys.readouterr().out
