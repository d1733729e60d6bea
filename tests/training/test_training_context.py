"""Ranks that share each microbatch take the step of one rank: real gloo ranks, float64, every term of the loss on.

Each kind of model and loss makes two updates, and five nightly. Plain cases of two, four and two times two ranks make five.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_sharded
from test_training_sharded import SCRIPT, joined, lines
from training_helpers import tiny_module
from training_partition import SEQUENCES
from training_ranks import Ranks, ranks_in, ranks_of
from training_sharded import Case

from asyncrl.errors import ConfigError
from asyncrl.models.attention.context import require_context
from asyncrl.models.paths import PLAIN

ONE_SET = [[0, i % 3] for i in range(SEQUENCES)]
TWO_SETS = [[i % 2, i % 3 if i % 2 else 0] for i in range(SEQUENCES)]
two, four = ranks_of(SCRIPT, 2), ranks_of(SCRIPT, 4)


@pytest.fixture(params=[2, pytest.param(5, marks=pytest.mark.slow)], ids="{} updates".format)
def updates(request: pytest.FixtureRequest) -> int:
    """The second update is the first from weights and an optimizer state that the ranks have made."""
    return int(request.param)


def check(ranks: Ranks, case: Case, tolerance: float = 1e-10, updates: int = 5) -> list[dict[str, Any]]:
    """After these updates each rank has the weights, optimizer state, metrics and log-probs of one rank that runs all
    microbatches."""
    case = replace(case, steps=updates)
    wanted = training_sharded.replicate(case)
    found = ranks.run(lines(ranks, case))
    close = {"rtol": 0.0, "atol": tolerance}
    assert max(grad.abs().max() for grad in wanted["gradient"].values()) > 1e-4
    copies = 1 if case.flat else case.shards or ranks.size
    for name, master in wanted["masters"].items():
        for first in range(0, ranks.size, copies):
            parts = found[first : first + copies]
            torch.testing.assert_close(joined(parts, "masters", name), master, **close)
            assert torch.equal(joined(parts, "masters", name), joined(found[:copies], "masters", name))
        state = torch.cat([part["optimizer"][name]["exp_avg_sq"] for part in found[:copies]])
        torch.testing.assert_close(state, wanted["optimizer"][name]["exp_avg_sq"], **close)
    for part in found:
        for mine, theirs in zip(part["numbers"], wanted["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=100 * tolerance, abs=1e-9)
    # With the first weights, and with the last.
    for when in (0, 1):
        for sibling in range(case.context):
            logprobs = [values for part in found[sibling :: case.context] for values in part["exact"][when]]
            for mine, theirs in zip(logprobs, wanted["exact"][when], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=8 * torch.finfo(mine.dtype).eps, atol=tolerance)
    return found


BASE = Case(where=ONE_SET, flat=True, context=2)
SLOW = pytest.mark.slow
BOTH_PATHS = pytest.mark.parametrize("path", ["fused", pytest.param("packed", marks=SLOW)])
PATHS_AND_CHECKPOINTING = pytest.mark.parametrize(
    ("path", "checkpointing"),
    [
        ("fused", False),
        ("packed", True),
        pytest.param("fused", True, marks=SLOW),
        pytest.param("packed", False, marks=SLOW),
    ],
)


@PATHS_AND_CHECKPOINTING
def test_two_ranks_take_the_step_of_one(two: Ranks, path: str, checkpointing: bool) -> None:
    check(two, replace(BASE, path=path, checkpointing=checkpointing))


@BOTH_PATHS
def test_four_ranks_repeat_the_heads_of_keys(four: Ranks, path: str) -> None:
    """Two heads of keys and values for four ranks."""
    check(four, replace(BASE, context=4, path=path, kind="qwen3"))


@BOTH_PATHS
def test_six_heads_of_which_two_share_a_head_of_keys(two: Ranks, path: str, updates: int) -> None:
    """Rank 0 needs the first head of keys twice and the second once, so each is sent twice."""
    check(two, replace(BASE, path=path, kind="six heads"), updates=updates)


@BOTH_PATHS
def test_adapters(two: Ranks, path: str, updates: int) -> None:
    check(two, replace(BASE, path=path, lora=3), updates=updates)


@PATHS_AND_CHECKPOINTING
@pytest.mark.parametrize("kind", ["window", "sinks"])
def test_windows_capped_scores_and_sinks(four: Ranks, path: str, kind: str, checkpointing: bool, updates: int) -> None:
    check(four, replace(BASE, context=4, path=path, kind=kind, checkpointing=checkpointing), updates=updates)


@PATHS_AND_CHECKPOINTING
def test_experts_their_routes_and_their_balance(two: Ranks, path: str, checkpointing: bool, updates: int) -> None:
    check(two, replace(BASE, path=path, kind="moe", routes=True, checkpointing=checkpointing), updates=updates)


@pytest.mark.parametrize("kind", ["capped", pytest.param("scaled", marks=SLOW), pytest.param("biased", marks=SLOW)])
def test_what_a_model_does_around_its_head(two: Ranks, kind: str, updates: int) -> None:
    """With the epsilon of the other tests AdamW enlarges rounding: log-probs of "scaled" by one rank that runs its microbatches in
    another order differ by 7e-11 after five steps, with this one by 4e-13."""
    check(two, replace(BASE, kind=kind, tied=kind == "capped", eps=1e-3), updates=updates)


def test_a_surveyed_step(two: Ranks, updates: int) -> None:
    """If the entropies of both siblings counted, the survey would keep three tokens more."""
    check(two, replace(BASE, seed=11, surveyed=True), updates=updates)


def test_two_sets_whose_step_is_surveyed(four: Ranks, updates: int) -> None:
    check(four, replace(BASE, where=TWO_SETS, surveyed=True), updates=updates)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("context", [2, 4])
def test_fewer_tokens_than_ranks(four: Ranks, flat: bool, context: int, updates: int) -> None:
    """One set, or two."""
    where = [[0, 0], [4 // context - 1, 0]]
    check(four, replace(BASE, where=where, context=context, flat=flat, few=True), updates=updates)


# With the rate and the epsilon of the other tests AdamW enlarges rounding: log-probs of one rank that runs its microbatches in
# another order differ by up to 2e-4 after five steps.
FLOAT32 = replace(BASE, dtype="float32", lr=1e-3, eps=3e-3)


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "llama"},
        *(pytest.param({"kind": kind}, marks=SLOW) for kind in ("window", "sinks", "capped")),
        pytest.param({"kind": "moe", "routes": True}, marks=SLOW),
        {"lora": 3},
        {"path": "packed", "checkpointing": True},
    ],
    ids=str,
)
def test_float32(two: Ranks, changed: dict[str, Any], updates: int) -> None:
    check(two, replace(FLOAT32, **changed), 1e-5, updates=updates)


@pytest.mark.parametrize("flat", [True, pytest.param(False, marks=SLOW)])
def test_float32_on_four_ranks(four: Ranks, flat: bool, updates: int) -> None:
    check(four, replace(FLOAT32, where=TWO_SETS, flat=flat), 1e-5, updates=updates)


@pytest.mark.parametrize(
    ("shards", "keep"),
    [(None, False), (2, True), pytest.param(None, True, marks=SLOW), pytest.param(2, False, marks=SLOW)],
)
def test_two_sets_and_shards_of_the_model(four: Ranks, shards: int | None, keep: bool) -> None:
    """Over all ranks, and over the ranks of a set. Set 1 has more microbatches, so set 0 runs some of weight 0."""
    check(four, replace(BASE, where=TWO_SETS, flat=False, shards=shards, keep=keep, checkpointing=keep))


@pytest.mark.parametrize("kind", ["window", "moe"])
def test_shards_of_models_with_windows_and_with_experts(four: Ranks, kind: str, updates: int) -> None:
    check(
        four,
        replace(BASE, where=TWO_SETS, flat=False, kind=kind, routes=kind == "moe", checkpointing=True),
        updates=updates,
    )


def test_a_set_whose_groups_are_all_skipped(four: Ranks, updates: int) -> None:
    case = replace(BASE, where=[[1, i % 2] for i in range(SEQUENCES)], silent=[2, 0], plain=True)
    for flat in (True, False):
        check(four, replace(case, flat=flat), updates=updates)


def test_the_comparison_has_teeth(two: Ranks) -> None:
    """A microbatch that is left out is seen."""
    found = two.run(lines(two, replace(BASE, where=[*ONE_SET[:-1], [7, 7]])))
    wanted = training_sharded.replicate(BASE)
    assert any((found[0]["masters"][name] - master).abs().max() > 1e-5 for name, master in wanted["masters"].items())


def test_bfloat16_products_have_float32_masters(two: Ranks) -> None:
    """As close to float64 as one rank is."""
    case = replace(BASE, steps=1)
    exact, one = (training_sharded.replicate(replace(case, dtype=dtype)) for dtype in ("float64", "bfloat16"))
    found, _ = two.run(lines(two, replace(case, dtype="bfloat16")))
    for name, gradient in exact["gradient"].items():
        errors = [float((part["gradient"][name].double() - gradient).norm()) for part in (found, one)]
        assert errors[0] < 2 * errors[1] + 1e-4, name


@pytest.mark.parametrize("spoilt", ["token", "route"])
def test_an_unknown_id_that_one_sibling_computes_ends_the_step_of_all(two: Ranks, spoilt: str) -> None:
    """Token 1 belongs to rank 1. Errors name the groups, so that a run can name their source."""
    case = replace(BASE, kind="moe", routes=True, spoilt=spoilt)
    for part in two.run(lines(two, case)):
        assert "a record changed after it was checked" in part["error"] and "another rank" not in part["error"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (replace(BASE, path="plain"), "distributed.context is 2, but this model runs on the path plain"),
        (replace(BASE, context=3), "distributed.context is 3, but the model has 4 attention heads"),
    ],
)
def test_models_whose_microbatches_ranks_cannot_share(two: Ranks, case: Case, text: str) -> None:
    if case.context == 2:
        for part in two.run(lines(two, case)):
            assert part["error"].startswith(text)
    with pytest.raises(ConfigError, match=text):
        require_context(tiny_module().config, PLAIN[0] if case.path else None, case.context)


def test_a_rank_that_dies_ends_its_set_with_an_error(tmp_path: Path) -> None:
    """Rank 1 is killed while rank 0 waits for its heads."""
    with ranks_in(SCRIPT, tmp_path, 2) as ranks:
        ranks.run(lines(ranks, BASE))
        waiting, killed = ranks.processes
        assert waiting.stdin is not None and waiting.stdout is not None
        waiting.stdin.write(BASE.line())
        waiting.stdin.flush()
        killed.kill()
        assert waiting.stdout.readline() == ""  # it ended
        assert waiting.wait(120) != 0
        assert "RankLost" in ranks.log(0) and "all_to_all" in ranks.log(0), ranks.log(0)
