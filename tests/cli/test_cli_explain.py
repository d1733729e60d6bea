"""`asyncrl explain`: formula, normaliser, paper and defaults of everything that has a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.algorithms.importance import IMPORTANCE_MODES
from asyncrl.algorithms.registry import ADVANTAGES, LOSSES
from asyncrl.cli.app import main
from asyncrl.cli.explain import explain, known
from asyncrl.config.fields import OTHER_NAMES, config_fields
from asyncrl.telemetry.budget import KINDS
from asyncrl.telemetry.explained import metric, metrics
from asyncrl.telemetry.records import CAUSES
from asyncrl.telemetry.reward_signal import LACKING


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_formula_paper_and_normaliser(name: str) -> None:
    text = explain(name)
    assert f"loss {name}" in text and "Formula:" in text and ("Paper:" in text or "Source:" in text)
    assert f"divided by: {LOSSES[name].normaliser.value}" in text


def test_every_name_is_explained() -> None:
    for name in (*ADVANTAGES, *IMPORTANCE_MODES, *known(), *config_fields(), *OTHER_NAMES):
        assert len(explain(name)) > 40, name


def test_settings_show_default_interactions_and_formula() -> None:
    text = explain("algorithm.importance.floor")
    assert "default null" in text and "geometric  exp(sum_t d_t" in text and "may change" in text
    assert "(a list, each item a string; default [all-linear])" in explain("model.lora.target_modules")
    assert "read by: cispo; refused with another built-in loss" in explain("algorithm.cispo.high")
    assert "eq. 9" in explain("algorithm.off_policy_mask.threshold")
    assert "loss grpo" in explain("grpo") and "advantage grpo" in explain("grpo")
    assert "its own settings, algorithm.sapo.*: temperature_pos=1.0" in explain("sapo")


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


# -- metrics

RECORDED = {"count", "gauge", "observe", "timed", "_count"}  # methods whose first argument is the name of a metric
# Names that are put together of what a variable holds.
MADE_OF = {
    "text/{}": list(LACKING),
    "data/{}": [f"data/{name}" for name in ("epoch", "delivered", "cut", "skipped")],
    "groups/{}/{}": [f"groups/{outcome}/any reason: at all" for outcome in ("dropped", "failed")],
    "idle/{}": [f"idle/{cause}" for cause in (*CAUSES, "unexplained")],
    "tools/{}/{}": [f"tools/some/{outcome}" for outcome in ("refused", "failed")],
    "filter/{}": ["filter/kept"],  # the others are in the books alone
}


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _keys(node: ast.AST) -> Iterator[ast.AST]:
    """What may be the name of a metric: what a recorder is told, and the keys of dictionaries."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in RECORDED and node.args:
        yield node.args[0]
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.DictComp):
        yield node.key
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
        yield node.value  # WITHOUT_SIGNAL = "reward/steps_without_signal"


def declared() -> set[str]:
    """Every name of a metric in the code: `{}` stands for a variable."""
    sections = {name.partition("/")[0] for name in metrics()}
    found = set()
    for path in Path(asyncrl.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if re.search(rf"\"({'|'.join(sections)})/", text) is None:
            continue
        for node in ast.walk(ast.parse(text)):
            found.update(_text(key) for key in _keys(node))
    # Closures have names of the same form.
    return {
        name
        for name in found - {*KINDS}
        if name.partition("/")[0] in sections and re.fullmatch(r"\w+(/[\w@{}]+)+", name)
    }


def test_every_metric_of_the_code_is_explained() -> None:
    names = declared()
    assert {
        "optim/grad_norm",
        "vespo/phi_mean",
        "clip_ratio/low_mean",
        "idle/{}",
        "moe/balance_loss",
        "time/reward",
    } < names
    asked = {each for name in names for each in MADE_OF.get(name, [name.replace("{}", "some")])}
    assert sorted(name for name in asked if metric(name) is None) == []
    for name in asked:
        assert f"metric {name}" in explain(name) and "unit: " in explain(name)


def test_every_row_of_the_table_has_unit_meaning_and_a_bad_value_and_names_what_there_is() -> None:
    for row in metrics().values():
        assert row.unit and row.meaning and row.bad, row.name
        for named in re.findall(r"`([a-z_]+(?:[./][a-z_*/0-9]+)+)`", f"{row.meaning} {row.bad}"):
            known = named in config_fields() or metric(named.replace("*", "reward")) is not None
            assert known or named in ("config.json", "policy.note", "policy.base_url"), f"{row.name} names {named}"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optim/gradnorm", "optim/grad_norm"),
        ("reward/exact/men", "reward/mean"),
        ("idle/enviroment", "idle/environment"),
        ("eval/math/avg_4", "eval/<environment>/avg@<k>"),
        ("train.lrr", "train.lr"),
    ],
)
def test_a_mistyped_name_of_a_metric_or_setting(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert main(["explain", typed]) == 2
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


def test_a_name_of_several_things_and_the_last_part_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "kl", "grad_norm", "idle/worker 0/reward"]) == 0
    out = capsys.readouterr().out
    assert "KL estimator" not in out and "kl, as other code bases call it, is algorithm.kl.coef here." in out
    assert "metric kl  (unit: nats per token)\nKL(policy, reference)" in out
    assert "metric optim/grad_norm  (unit: none)" in out
    assert (
        "metric idle/worker 0/reward, one of idle/<lane>/<cause>" in out and "metric idle/reward  (unit: share" in out
    )
