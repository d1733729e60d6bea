"""fsdp is replicate: gradients, weights, optimizer state, metrics and log-probs of real gloo ranks against one rank that holds
everything, float64, every term of the loss on. The ranks live as long as the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training_helpers import HEADS, LOSS, MAX_LENGTH, make_group, microbatches, tiny_module, tiny_policy, train_step
from training_partition import SEQUENCES
from training_ranks import Ranks, ranks_in, ranks_of
from training_sharded import Case

from asyncrl.config.schema import TrainConfig
from asyncrl.distributed.fsdp import rows
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, DataError, TrainStepError
from asyncrl.models.policy import PolicyModel
from asyncrl.pumps.building import microbatch_of_counts
from asyncrl.training.passes import unknown_id_error
from asyncrl.training.sharded import ShardedForward, ShardedTrainer

SCRIPT = str(Path(training_sharded.__file__))
two, three, four = (ranks_of(SCRIPT, size) for size in (2, 3, 4))


def joined(parts: list[dict[str, Any]], what: str, name: str) -> torch.Tensor:
    return torch.cat([part[what][name] for part in parts])


def lines(ranks: Ranks, case: Case, rounds: list[list[int]] | None = None) -> list[str]:
    """Of each rank. `rounds[rank]`: see `Case.rounds`."""
    return [replace(case, rounds=rounds[rank] if rounds else []).line() for rank in range(ranks.size)]


def check(ranks: Ranks, case: Case, rounds: list[list[int]] | None = None, tolerance: float = 1e-10) -> None:
    wanted = training_sharded.replicate(case)
    found = ranks.run(lines(ranks, case, rounds))
    same(found, wanted, tolerance, 1 if case.flat else case.then[0] if case.then else case.shards)


def same(found: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float, shards: int | None = None) -> None:
    assert max(grad.abs().max() for grad in wanted["gradient"].values()) > 1e-4
    close = {"rtol": 0.0, "atol": tolerance}
    copies = [found[first : first + (shards or len(found))] for first in range(0, len(found), shards or len(found))]
    for name, master in wanted["masters"].items():
        for copy_ in copies:  # equal to the last bit
            for what in ("masters", "gradient"):
                assert torch.equal(joined(copy_, what, name), joined(copies[0], what, name))
        torch.testing.assert_close(joined(copies[0], "masters", name), master, **close)
        torch.testing.assert_close(joined(copies[0], "gradient", name), wanted["gradient"][name], **close)
        for part in found:  # every rank's engine has all of it
            torch.testing.assert_close(part["served"][name], master.to(part["served"][name].dtype), **close)
        for key in ("exp_avg", "exp_avg_sq"):
            state = torch.cat([part["optimizer"][name][key] for part in copies[0]])
            torch.testing.assert_close(state, wanted["optimizer"][name][key], **close)
    for part in found:
        for mine, theirs in zip(part["numbers"], wanted["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=max(100 * tolerance, 1e-8), abs=1e-10)
    logprobs = [values for part in found for values in part["logprobs"]]
    for mine, theirs in zip(logprobs, wanted["logprobs"], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=3e-5)


UNEQUAL = [[i % 2, i % 3 if i % 2 else 0] for i in range(SEQUENCES)]  # one microbatch here, up to three there
EMPTY = [[1, i % 2] for i in range(SEQUENCES)]  # rank 0 has none
MASKED = [
    [2 * (i == 5), i % 4] for i in range(SEQUENCES)
]  # sequence 5 is fully masked: all that rank 2 has; rank 1 has none


OF_FOUR = [[i % 4, i % 3 if i % 2 else 0] for i in range(SEQUENCES)]
# Rank 2 has none.
OF_THREE = [[(0, 1, 3)[i % 3], i % 2] for i in range(SEQUENCES)]


@pytest.mark.parametrize(
    ("shards", "keep"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(None, True, marks=pytest.mark.slow)],
)
def test_two_copies_of_the_model_and_weights_that_stay_gathered(four: Ranks, shards: int | None, keep: bool) -> None:
    """2 x 2 ranks: the model is cut over two, and gradients are summed over all four."""
    check(four, Case(where=OF_FOUR, shards=shards, keep=keep, silent=[0, 0, 1, 0], steps=3))
    check(four, Case("dapo", where=OF_THREE, shards=shards, keep=keep, kind="narrow"))
    check(four, Case(where=OF_FOUR, shards=shards, keep=keep, dtype="float32", checkpointing=True), tolerance=3e-5)


def test_kept_weights_are_gathered_once_a_step_and_gradients_are_reduced_once(four: Ranks) -> None:
    """Two layers and the root around them. Counts, metrics and norm take a reduction each, however many microbatches there are."""
    for count in (1, 3):
        where = [[i % 4, i % count] for i in range(SEQUENCES)]
        for shards, reductions in ((None, 3), (2, 6)):
            for part in four.run(lines(four, Case(where=where, shards=shards, keep=True, counted=True))):
                assert part["collectives"] == 2 * [{"_allgather_base_": 3, "allreduce_": 3 + reductions}]
        [first, *_] = four.run(lines(four, Case(where=where, counted=True)))
        # A layer is gathered twice, and the root once. The weights of the new version are gathered once more.
        assert first["collectives"][1]["_allgather_base_"] == 5 * count + 3
        assert first["collectives"][1]["_reduce_scatter_base_"] == 3 * count


@pytest.mark.parametrize(
    ("case", "flipped", "named"),
    [
        pytest.param(Case(flat=True, steps=12), 10, "rank 3", marks=pytest.mark.slow),
        (Case(flat=True, steps=12), 0, "rank 3"),  # such as a file that differs on another disk
        (Case(shards=2, keep=True, steps=12), 10, "rank 3"),
    ],
)
def test_one_flipped_bit_on_one_rank_ends_the_run(four: Ranks, case: Case, flipped: int, named: str) -> None:
    """At the first step and at every tenth. With two copies rank 3 disagrees with rank 1, whose rows are the same."""
    tensor = "model.layers.1.mlp.up_proj.weight"
    case = replace(case, where=OF_FOUR)
    for part in four.run(lines(four, replace(case, flip=[3, flipped, tensor]))):
        error = part["error"]
        assert error.startswith(
            f"the weights of version {flipped} are not the same on all ranks: training {named} (first in {tensor})"
        )


def test_equal_ranks_and_a_bit_that_no_other_rank_holds_end_nothing(four: Ranks) -> None:
    check(four, Case(where=OF_FOUR, flat=True, steps=11))
    for part in four.run(lines(four, Case(where=OF_FOUR, flip=[3, 0, "model.norm.weight"]))):
        assert "error" not in part  # one copy of the model: nobody has the same rows


@pytest.mark.parametrize(
    ("shards", "keep", "then"), [(2, False, [None, True]), pytest.param(4, False, [2, True], marks=pytest.mark.slow)]
)
def test_a_saved_state_goes_on_with_another_cut(four: Ranks, shards: int, keep: bool, then: list[Any]) -> None:
    check(four, Case(where=OF_FOUR, shards=shards, keep=keep, then=then))


@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.slow), "dapo"])
def test_two_ranks_with_unequal_numbers_of_microbatches(two: Ranks, name: str) -> None:
    check(two, Case(name, where=UNEQUAL))


@pytest.mark.parametrize(
    "rounds",
    [
        [[0, 1, 9], [1, 1, 1]],
        [[], [1, 2]],
        *(pytest.param(rounds, marks=pytest.mark.slow) for rounds in ([[1], [2]], [[0, 0, 0], []])),
    ],
)
def test_rounds_may_come_at_any_time_and_a_rank_that_finishes_joins_them(two: Ranks, rounds: list[list[int]]) -> None:
    check(two, Case(where=UNEQUAL), rounds)


def test_an_empty_rank_and_one_with_a_masked_row_alone(two: Ranks, three: Ranks) -> None:
    check(two, Case(where=EMPTY))
    check(three, Case(where=MASKED))
    check(three, Case("dapo", where=MASKED), [[1], [0], [1]])


@pytest.mark.parametrize("silent", [[1, 0], pytest.param([0, 2], marks=pytest.mark.slow)])
def test_groups_without_advantages_are_counted_and_ask_for_no_place_in_a_round(two: Ranks, silent: list[int]) -> None:
    check(two, Case(where=EMPTY, silent=silent), [[0], [1]])


def test_a_rank_that_skips_equals_ranks_that_run_everything(two: Ranks) -> None:
    """Rank 0 has two groups without advantages and nothing else: it skips them, and runs nothing. All metrics but means over
    what was run are those of a step that runs them."""
    case = Case("dapo", where=EMPTY, silent=[2, 0], plain=True)
    wanted = training_sharded.replicate(case, run_all=True)
    found = two.run(lines(two, case, [[0], [1]]))
    for one in (wanted, *found):
        one["numbers"] = [{name: each[f"step/{name}"] for name in training_sharded.KEPT} for each in one["numbers"]]
    wanted["logprobs"] = wanted["logprobs"][-len(found[1]["logprobs"]) :]  # of what runs: rank 1 has all of it
    same(found, wanted, 1e-10)


def test_a_rank_may_hold_no_row_of_a_parameter(three: Ranks) -> None:
    """The norms of 4 elements: two rows, two, and none."""
    check(three, Case(where=MASKED, kind="narrow", steps=2))


@pytest.mark.parametrize(("kind", "tied"), [pytest.param("llama", False, marks=pytest.mark.slow), ("qwen3", True)])
def test_other_models_and_checkpointing(two: Ranks, kind: str, tied: bool) -> None:
    check(two, Case(where=UNEQUAL, kind=kind, tied=tied, checkpointing=True))


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_model_does_around_its_head(two: Ranks, kind: str) -> None:
    check(two, Case(where=UNEQUAL, kind=kind, tied=kind == "capped"))


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("grpo", True), pytest.param("dapo", False, marks=pytest.mark.slow)]
)
def test_experts_their_routes_and_their_balance(two: Ranks, name: str, checkpointing: bool) -> None:
    """Rank 0 alone has microbatches in some rounds: whatever its tokens choose, the other gathers the same blocks."""
    where = [[i % 4 == 0, i % 3] for i in range(SEQUENCES)]
    check(two, Case(name, where=where, kind="moe", checkpointing=checkpointing, routes=True))


def test_one_rank_is_one_shard(tmp_path: Path) -> None:
    with ranks_in(SCRIPT, tmp_path, 1) as one:
        check(one, Case(where=[[0, i % 3] for i in range(SEQUENCES)]), [[1]])


def test_bfloat16_products_have_float32_masters(two: Ranks) -> None:
    """Close to replicate, and no closer: its gradients of embedding and head add up in float32, FSDP2's in bfloat16."""
    found = two.run(lines(two, Case(where=UNEQUAL, dtype="bfloat16", steps=1)))
    exact = training_sharded.replicate(Case(where=UNEQUAL, steps=1))
    for name, gradient in exact["gradient"].items():
        shard = joined(found, "gradient", name)
        assert shard.dtype == joined(found, "masters", name).dtype == torch.float32
        assert found[0]["served"][name].dtype == torch.bfloat16
        assert torch.equal(found[0]["served"][name], joined(found, "masters", name).bfloat16())
        assert torch.equal(found[0]["served"][name], found[1]["served"][name])
        assert (shard.double() - gradient).norm() < 0.1 * gradient.norm() + 1e-4, name


places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)).map(list), min_size=SEQUENCES, max_size=SEQUENCES)


@pytest.mark.parametrize("examples", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_any_partition_over_three_ranks_is_the_same_step(three: Ranks, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(
        where=places,
        seed=st.integers(0, 2**16),
        rounds=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=3, max_size=3),
        name=st.sampled_from(["grpo", "cispo", "vespo"]),
    )
    def holds(where: list[list[int]], seed: int, rounds: list[list[int]], name: str) -> None:
        check(three, Case(name, seed, where=where, silent=[0, 0, 1], steps=1), rounds)

    holds()


def test_the_comparison_has_teeth(two: Ranks) -> None:
    """A microbatch that is left out is seen."""
    wanted = training_sharded.replicate(Case(where=UNEQUAL, steps=1))
    found = two.run(lines(two, Case(where=[*UNEQUAL[:-1], [7, 7]], steps=1)))
    with pytest.raises(AssertionError):
        same(found, wanted, 1e-10)


def test_a_rank_that_dies_ends_the_others_with_an_error(tmp_path: Path) -> None:
    """Rank 1 is killed while rank 0 waits for it in a collective."""
    with ranks_in(SCRIPT, tmp_path, 2) as ranks:
        ranks.run(lines(ranks, Case(where=UNEQUAL, steps=1)))
        waiting, killed = ranks.processes
        assert waiting.stdin is not None and waiting.stdout is not None
        waiting.stdin.write(Case(where=UNEQUAL, rounds=[0]).line())
        waiting.stdin.flush()
        killed.kill()
        assert waiting.stdout.readline() == ""  # it ended
        assert waiting.wait(120) != 0
        assert "RankLost" in ranks.log(0) and "broadcast_" in ranks.log(0), ranks.log(0)


# -- what one process can tell -----------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Iterator[ShardedTrainer]:
    with World().open(torch.device("cpu"), single_rank_group=True) as world:
        policy = PolicyModel(tiny_module(), "float64", served=True)
        yield ShardedTrainer(policy, tiny_module(), TrainConfig(lr=0.01), world, max_completion_length=MAX_LENGTH)


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_loaded_weights_become_masters_a_block_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modules of a sharded run keep one copy of the weights, in the dtype of the files."""
    loaded = tiny_module(kind).bfloat16()
    twin = copy.deepcopy(loaded, {id(p): torch.nn.Parameter(p.detach()) for p in loaded.parameters()})
    expected = {name: p.detach().float() for name, p in loaded.named_parameters()}
    whole = []

    def cut(part: torch.nn.Module, **options: Any) -> Any:
        full = [p for p in twin.parameters() if not isinstance(p, DTensor) and p.dtype == torch.float32]
        mine = {id(p) for p in part.parameters()}
        whole.append((len(full), all(id(p) in mine for p in full)))
        return fully_shard(part, **options)

    monkeypatch.setattr("asyncrl.distributed.fsdp.fully_shard", cut)
    with World().open(torch.device("cpu"), single_rank_group=True) as world:
        policy = PolicyModel(loaded, "bfloat16", served=True)
        core = ShardedTrainer(policy, twin, TrainConfig(lr=0.01), world, max_completion_length=MAX_LENGTH)
        masters = dict(core.sharded.parameters.named_masters())
        assert all(
            masters[name].dtype == torch.float32 and torch.equal(masters[name], expected[name]) for name in expected
        )
        assert len(whole) == 3 and all(count and mine for count, mine in whole)
        assert max(count for count, _ in whole) < len(expected) / 2
        before = policy.flat.working.clone()
        assert train_step(core, microbatches()).version == 1
        assert not torch.equal(policy.flat.working, before)


def test_an_aborted_step_leaves_nothing_behind(core: ShardedTrainer) -> None:
    before = {name: master.clone() for name, master in core.sharded.parameters.named_masters()}
    for runs in (0, 2):  # microbatches that had their turn
        core.begin_train_step(LOSS)
        for batch in microbatches(1):
            core.train_microbatch(batch)
        assert core.agree_on_round(finishing=False) == 3
        for _ in range(runs):
            core.run_agreed()
        core.abort_train_step()
        core.abort_train_step()
    assert core.version == 0 and not core.sharded.parameters.grad.any()
    assert all(torch.equal(before[name], master) for name, master in core.sharded.parameters.named_masters())
    result = train_step(core, microbatches(3))
    assert result.version == core.version == 1 and result.grad_norm > 0


def test_the_first_step_of_all_may_have_nothing_to_run(core: ShardedTrainer) -> None:
    """All its groups are skipped: weights are gathered before any forward."""
    result = train_step(core, [microbatch_of_counts([make_group(np.random.default_rng(0), 3)[0]])])
    assert (result.version, result.grad_norm) == (1, 0.0) and result.tokens > 0
    assert train_step(core, microbatches()[:1]).grad_norm > 0


def test_token_ids_that_the_model_lacks_end_the_step_by_the_name_of_their_group(core: ShardedTrainer) -> None:
    """At the finish, which all ranks come to: until then the round goes on."""
    good = microbatches()[0]
    core.begin_train_step(LOSS)
    core.train_microbatch(replace(good, target=np.where(np.arange(good.scored) == good.scored - 1, 10**6, good.target)))
    core.train_round()
    with pytest.raises(DataError, match="the model has no token 1000000") as raised:
        core.finish_train_step()
    assert raised.value.groups == (int(good.group_ids[good.sequence[-1]]),) and core.version == 0
    core.abort_train_step()
    assert str(unknown_id_error([], 41)).startswith("another rank has a token or a route that the model lacks")


def test_a_loss_that_raises_leaves_the_step_open_and_abort_cleans_up(core: ShardedTrainer) -> None:
    def fails(inputs: Any) -> Any:
        if inputs.logp_S.numel():
            raise FloatingPointError("this loss does not like the microbatch")
        return LOSS(inputs)

    core.begin_train_step(replace(LOSS, fn=fails))
    core.train_microbatch(microbatches()[0])
    with pytest.raises(FloatingPointError):
        core.train_round()
    with pytest.raises(TrainStepError, match="already open"):
        core.begin_train_step(LOSS)
    core.abort_train_step()
    assert train_step(core, microbatches()[:1]).version == 1


def test_state_goes_there_and_back(core: ShardedTrainer) -> None:
    for seed in (1, 2):
        train_step(core, microbatches(seed))
    state = core.state_dict()
    assert state["shard"] == {"rank": 0, "ranks": 1}
    policy = PolicyModel(tiny_module(seed=5), "float64", served=True)
    other = ShardedTrainer(policy, tiny_module(seed=5), TrainConfig(lr=0.01), World(), max_completion_length=MAX_LENGTH)
    other.load_state_dict(state)
    assert other.version == 2 and torch.equal(other.policy.flat.working, core.policy.flat.working)
    for trainer in (core, other):
        train_step(trainer, microbatches(4)[:1])
    assert torch.equal(other.policy.flat.working, core.policy.flat.working)
    del state["masters"]["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        other.load_state_dict(state)


def test_rows_are_cut_as_torch_chunks_them() -> None:
    for count in (1, 2, 5, 16, 41):
        for ranks in (1, 2, 3, 7):
            chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(ranks)]
            cuts = [rows(count, rank, ranks) for rank in range(ranks)]
            assert [list(range(*cut)) for cut in cuts if cut[0] < cut[1]] == chunks


def test_a_module_for_each_expert_is_refused_and_so_is_a_missing_group() -> None:
    module = tiny_module()
    module.model.layers[1].mlp.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
    with pytest.raises(ConfigError, match=r"for each expert \(model\.layers\.1\.mlp\.experts\).*=replicate"):
        ShardedForward(module, tiny_policy(), False, collectives=World())
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ShardedForward(tiny_module(), tiny_policy(), False, collectives=World())
