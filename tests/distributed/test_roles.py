"""Roles of ranks: what the setting means, what is refused, and the collectives of the training ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import DistributedConfig, LoraConfig, RolesConfig
from asyncrl.distributed.roles import Roles
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.models.loading import adapter_sizes, parameter_count
from asyncrl.runtime.memory import predicted
from asyncrl.runtime.placement import place

ROOT = Path(__file__).resolve().parents[2]


def roles(ranks: int, **setting: Any) -> Roles:
    return Roles.resolve(DistributedConfig(roles=RolesConfig(**setting)), ranks)


def test_without_roles_every_rank_does_both() -> None:
    every = roles(3)
    assert (every.train, every.generate, every.differ) == ((0, 1, 2), (0, 1, 2), False)
    assert World(2, 3).train.rank == 2 and World(2, 3).roles == every


def test_counts_give_the_first_ranks_to_training() -> None:
    given = roles(4, train=1, generate=3)
    assert (given.train, given.generate, given.differ) == ((0,), (1, 2, 3), True)
    assert given.describe(2) == "rank 2 only generates (distributed.roles: train rank 0, generate ranks 1-3)"


def test_a_rank_in_both_lists_does_both() -> None:
    given = roles(4, train=(1, 0), generate=(3, 1, 2))
    assert (given.train, given.generate) == ((0, 1), (1, 2, 3))
    assert given.describe(1).startswith("rank 1 trains and generates (")
    assert not roles(2, train=(0, 1), generate=(1, 0)).differ


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"train": 1}, "roles.generate is not; set both"),
        ({"train": 1, "generate": 2}, "which are 3 ranks, and the run has 4; start 3 ranks"),
        ({"train": 0, "generate": 4}, "roles.train names no rank"),
        ({"train": 5, "generate": -1}, "give counts of at least 0"),
        ({"train": 4, "generate": 0}, "roles.generate names no rank"),
        ({"train": (0, 1), "generate": 2}, "train: [0, 1], generate: 2}: give two counts"),
        ({"train": (0, 0, 1), "generate": (2, 3)}, "names rank 0 twice"),
        ({"train": (0, 1), "generate": (2, 3, 4, 5)}, "names ranks 4-5, and the run has the ranks 0 to 3"),
        ({"train": (0,), "generate": (3,)}, "gives ranks 1-2 no role"),
        ({"train": (1, 2), "generate": (0, 3)}, "add rank 0, which writes the checkpoints"),
        ({"train": (), "generate": (0, 1, 2, 3)}, "roles.train names no rank"),
    ],
)
def test_what_no_run_can_be_is_refused(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        roles(4, **setting)
    assert text in str(refused.value)


def test_no_rank_has_to_generate_if_nodes_may_join() -> None:
    for generate in (0, ()):
        setting = RolesConfig(train=2 if generate == 0 else (0, 1), generate=generate)
        given = Roles.resolve(DistributedConfig(roles=setting, listen="127.0.0.1:0"), 2)
        assert (given.train, given.generate, given.sends) == ((0, 1), (), True)
        assert "rank 1 only trains (distributed.roles: train ranks 0-1, generate no rank; " in given.describe(1)
        with pytest.raises(ConfigError, match=r"roles\.generate names no rank; .* or distributed\.listen"):
            Roles.resolve(DistributedConfig(roles=setting), 2)


def test_the_training_ranks_form_sets_of_siblings() -> None:
    given = Roles.resolve(DistributedConfig(context=2, roles=RolesConfig(train=(0, 1, 4, 5), generate=(0, 2, 3))), 6)
    assert (given.leaders, given.sets) == ((0, 4), [(0, 1), (4, 5)])
    assert (given.siblings(5), given.siblings(2)) == ((4, 5), ())
    assert given.shared(4) == " (rank 4 shares sequences with rank 5: distributed.context)" and not given.shared(2)
    assert "distributed.context: ranks 4-5 share sequences, led by rank 4)" in given.describe(5)
    assert "share" not in given.describe(2)
    assert [(World(rank, 6, roles=given).leads, World(rank, 6, roles=given).follows) for rank in (4, 5, 2)] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    # The leader alone generates, and its sibling still gets the calls of its trainer.
    assert Roles.resolve(DistributedConfig(context=2, roles=RolesConfig(train=(0, 1), generate=(0,))), 2).differ
    assert Roles.ranks_named(DistributedConfig(context=4)) == 4


def config(*overrides: str) -> Any:
    given = (
        "train.max_steps=1",
        "data.train=x.jsonl",
        "reward.functions=x.py:f",
        "model.path=x",
        "model.dtype=float32",
    )
    return load_config([], [*given, "distributed.roles.train=1", "distributed.roles.generate=3", *overrides])


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("door.ring=name", "other programs generate the groups"),
        ("generation.placement=shared", "every engine runs in workers"),
        ("reroll.start_fraction=0.5", "does not see the rewards"),
    ],
)
def test_settings_that_roles_exclude_are_refused(setting: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(config(setting), 1, 3)


def test_the_slots_are_divided_among_the_ranks_that_generate() -> None:
    sizes = [resolve(config(), 1, ranks).engine.max_sequences for ranks in (1, 3)]
    assert sizes[0] == 3 * sizes[1]


def test_a_rank_plans_memory_for_what_it_does(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    given = config(f"model.path={ROOT / 'examples/quickstart_model.py'}:build")
    settings = resolve(given, 1, 3)
    both = predicted(settings, placement=place(settings, torch.device("cpu"), World(0, 4, 0, 4)))
    names = {}
    for rank in (0, 1):
        world = World(rank, 4, rank, 4, roles=roles(4, train=1, generate=3))
        placement = place(settings, torch.device("cpu"), world)
        assert (placement.trains, placement.generates, placement.workers) == (rank == 0, rank == 1, rank)
        names[rank] = set(predicted(settings, placement=placement))
    assert names[0] == set(both) - {"cache"}
    assert names[1] == {"copies", "workers", "cache", "libraries"}
    sharded = settings.model_copy(update={"distributed": settings.distributed.model_copy(update={"sharding": "fsdp"})})
    trains = place(sharded, torch.device("cpu"), World(0, 4, 0, 4, roles=roles(4, train=2, generate=2)))
    copies, board = predicted(settings, placement=placement)["copies"], 2 * parameter_count(settings.model) * 4
    assert copies == board
    # float32: of the board of each rank that trains, a half's stripe.
    whole = predicted(sharded, 2)["copies"]
    assert predicted(sharded, 2, placement=trains)["copies"] == whole + board // 2
    adapted = settings.model_copy(update={"model": settings.model.model_copy(update={"lora": LoraConfig(rank=2)})})
    # float32: the adapters, and each weight that has one.
    adapters, merged = adapter_sizes(adapted.model)
    assert predicted(adapted, placement=placement)["copies"] == copies + 4 * (adapters + merged)


PROGRAM = """
import torch
from asyncrl.config.schema import DistributedConfig, RolesConfig
from asyncrl.distributed import collectives
from asyncrl.distributed.roles import Roles
from asyncrl.distributed.world import World
from asyncrl.errors import LifecycleError
world = World.from_env()
world.roles = Roles.resolve(DistributedConfig(roles=RolesConfig(train=(0, 2), generate=(1, 2))), world.world_size)
with world.open(torch.device("cpu"), timeout_s=60):
    if world.trains:
        train = world.train
        assert (train.rank, train.world_size) == ({0: 0, 2: 1}[world.rank], 2)
        sums = train.all_reduce_sum_(torch.tensor([world.rank + 1.0], dtype=torch.float64))
        assert sums.tolist() == [4.0], sums
        assert train.reduce_gradients_(torch.full((3,), 10.0 ** world.rank)).tolist() == [101.0] * 3
        assert train.all_gather_bytes(b"%d" % world.rank) == [b"0", b"2"]
        collectives._PIECE_BYTES = 8  # two pieces
        assert train.broadcast_(torch.arange(3.0) + world.rank).tolist() == [0.0, 1.0, 2.0]
    else:
        try:
            world.train
        except LifecycleError as error:
            assert "only generates" in str(error)
        else:
            raise AssertionError("a rank that only generates has no training ranks")
assert not torch.distributed.is_initialized()
print(f"rank {world.rank} ok", flush=True)
"""


def test_collectives_run_over_the_training_ranks_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(program)]
    run = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert sorted(line for line in output.splitlines() if line.endswith(" ok")) == [f"rank {r} ok" for r in range(3)]


def test_a_rank_that_only_generates_has_no_training_ranks_before_it_is_open() -> None:
    world = World(1, 2, 1, 2, roles=roles(2, train=1, generate=1))
    with pytest.raises(LifecycleError, match="only generates"):
        _ = world.train
