"""Memory of a run before it starts: prompts that are measured, the budget of the cache, and a warning where it does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_helpers import MODEL, REAL, config_of

from asyncrl.config.resolve import resolve, slots
from asyncrl.config.schema import Config, DistributedConfig
from asyncrl.data.packing import pack_groups
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_sources import load_rows
from asyncrl.distributed.world import World
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.generation.embedded.sequences import Sequences
from asyncrl.models.paths import PACKED, PLAIN
from asyncrl.models.routing import RoutesShape
from asyncrl.runtime import memory
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.runtime.cards import Cards
from asyncrl.runtime.inputs import measure_prompts
from asyncrl.runtime.memory import Cut, check_memory, cut_model, kv_positions, predicted
from asyncrl.runtime.placement import Placement
from asyncrl.runtime.plan import plan
from asyncrl.runtime.runtime import Runtime
from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory


def with_file(folder: Path, lengths: list[int], *overrides: str) -> Config:
    """A real run whose prompts are words of one token each."""
    place = folder / "train.jsonl"
    place.write_text("".join(json.dumps({"prompt": "a" * size, "answer": "1"}) + "\n" for size in lengths))
    given = (f"data.train={place}", "data.max_prompt_tokens=500", "train.tokens_per_microbatch=600", *overrides)
    return resolve(config_of(folder, *given, base=REAL))


def test_the_cache_is_for_the_prompts_that_are_there(tmp_path: Path) -> None:
    config = with_file(tmp_path, [3, 9, 5])
    prompts = measure_prompts(config)
    sequences = config.engine.max_sequences
    assert sequences is not None and prompts.how == "the longest of 3 of 3 prompts" and prompts.longest < 20
    room = kv_positions(config, prompts)
    assert room == max(sequences * (prompts.longest + 8), 508)
    by_limit, by_prompts = predicted(config), predicted(config, prompts=prompts)
    assert by_prompts["kv_cache"] / by_limit["kv_cache"] == pytest.approx(room / (sequences * 508))
    assert f"cache: {room} positions for {sequences} sequences; prompts of up to {prompts.longest} tokens" in plan(
        config
    )


def sources(folder: Path, kind: str) -> str:
    """What `data.train` names: code that gives 30 prompts of 4 to 9 tokens."""
    made = {
        "list": "rows",
        "generator": "(row for row in rows)",
        "by number": "ByNumber()",
        "datasets": "__import__('datasets').Dataset.from_list(rows)",
    }
    place = folder / "given.py"
    place.write_text(
        "rows = [{'prompt': 'a' * (3 + i % 6), 'answer': '1'} for i in range(30)]\n"
        "class ByNumber:\n"
        "    def __len__(self): return len(rows)\n"
        "    def __getitem__(self, index): return rows[index]\n"
        f"def train(): return {made[kind]}\n"
    )
    return f"{place}:train"


@pytest.mark.parametrize("kind", ["list", "generator", "by number", "datasets"])
def test_prompts_that_code_gives_are_measured(tmp_path: Path, kind: str) -> None:
    config = with_file(tmp_path, [3])
    files = measure_prompts(with_file(tmp_path, [3 + i % 6 for i in range(30)]))
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": sources(tmp_path, kind)})})
    prompts = measure_prompts(config)
    assert prompts.longest == files.longest < 20 and prompts.how == "the longest of 30 of 30 prompts"
    assert f"prompts of up to {prompts.longest} tokens (the longest of 30 of 30 prompts)" in plan(config)


def test_rows_that_code_makes_at_each_access_are_few() -> None:
    """A puzzle that is generated may take milliseconds."""
    made: list[int] = []

    class Puzzles:
        def __len__(self) -> int:
            return 5000

        def __getitem__(self, index: int) -> dict[str, str]:
            made.append(index)
            return {"prompt": "x" * 9}

    source = PromptSource(load_rows(Puzzles()), ByteTokenizer())
    made.clear()
    assert source.longest() == (9, 200) and len(made) == 200


async def test_a_run_makes_room_for_the_prompts_that_a_program_brings(tmp_path: Path) -> None:
    """Not for `data.max_prompt_tokens`; a generator is read once, and all of it is played."""
    given = ("data.max_prompt_tokens=500", "train.tokens_per_microbatch=600", "train.max_steps=1")
    config = config_of(tmp_path, *given, "engine.max_sequences=64", base=REAL | {"data": {}})
    async with Runtime(config, prompts=({"prompt": "ab=", "answer": "a"} for _ in range(9)), write=False) as runtime:
        engine = runtime.built.ports.engine
        assert len(runtime.built.tokenizer.encode("ab=")) == 3
        assert isinstance(engine, EmbeddedEngine) and engine.kv_positions == 64 * (3 + 8)
        assert (await runtime.run()).version == 1


def test_a_sample_of_prompts_is_said_to_be_one(tmp_path: Path) -> None:
    prompts = measure_prompts(with_file(tmp_path, [3] * 1500))
    assert prompts.how == "the longest of 1000 of 1500 prompts, a sample; a longer prompt waits for room"


@pytest.mark.parametrize("source", ["environment", "own environment", "ring"])
def test_prompts_that_nobody_can_read_before_count_at_their_limit(tmp_path: Path, source: str) -> None:
    config = with_file(tmp_path, [3])
    if source == "environment":
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"environment": "a.py:Agent"})})
    elif source == "ring":
        config = config.model_copy(update={"data": config.data.model_copy(update={"train": None})})
    prompts = measure_prompts(config, own_environment=source == "own environment")
    assert prompts.longest == 500 and prompts.how.startswith("data.max_prompt_tokens: ")


def test_the_longest_prompt_is_that_of_a_sample_by_the_data_alone() -> None:
    def longest(count: int, **data: Any) -> tuple[int, int]:
        rows = [{"prompt": "x" * (1 + number % 97)} for number in range(count)]
        config = Config.model_validate({"data": data}).data
        return PromptSource(rows, ByteTokenizer(), config).longest()

    assert longest(200) == (97, 200)
    assert longest(5000) == longest(5000) == (97, 1000)
    assert (
        longest(200, max_prompt_tokens=50, overlong="cut")[0]
        == longest(200, max_prompt_tokens=50, overlong="skip")[0]
        == 50
    )
    assert longest(200, max_prompt_tokens=96, overlong="skip")[0] == 96


def test_the_path_and_the_device_are_part_of_a_prediction(tmp_path: Path) -> None:
    config = with_file(tmp_path, [3])
    sizes = [predicted(config, path=path)["activations"] for path in (None, PACKED, PLAIN[1])]
    assert sizes[0] < sizes[1] < sizes[2]
    shared = config.model_copy(update={"distributed": DistributedConfig(context=2)})
    assert predicted(shared, 2)["activations"] < 0.7 * sizes[0]


@pytest.mark.parametrize(
    ("machines", "per_machine", "cut"),
    [(2, 4, Cut(4, True)), (2, 4, Cut(4)), (2, 4, Cut(8)), (1, 4, Cut(4, True)), (4, 1, Cut(4, True)), (4, 1, Cut(4))],
)
def test_a_machine_holds_a_copy_of_the_model_if_it_fits(
    tmp_path: Path, machines: int, per_machine: int, cut: Cut
) -> None:
    """The cards have just enough memory for `cut`."""
    config = with_file(tmp_path, [3])
    config = config.model_copy(update={"distributed": DistributedConfig(sharding="fsdp")})
    world = World(0, machines * per_machine, 0, per_machine)
    needed = sum(predicted(config, world.world_size, cut=cut).values())

    class Card(Cards):
        def memory(self, device: torch.device) -> int:
            return int(needed / 0.85) + 1

    assert cut_model(config, torch.device("cuda:0"), world, None, Card()) == cut


def test_a_worker_with_vllm_has_a_begun_block_for_each_sequence(tmp_path: Path) -> None:
    config = with_file(tmp_path, [3], "generation.placement=worker", "engine.max_sequences=8")
    with_vllm = config.model_copy(update={"generation": config.generation.model_copy(update={"engine": "vllm"})})
    two = Placement((torch.device("cpu"),) * 2, 1, 1, "two workers")
    ours, theirs = (predicted(each, placement=two) for each in (config, with_vllm))
    position = ours["kv_cache"] // kv_positions(config)
    weights = ours["weight_board"] // 2
    assert theirs["workers"] == 2 * (weights + 4 * 32 * position + (900 << 20))
    assert {**theirs, "workers": ours["workers"]} == ours


def full_groups(count: int, size: int, prompt: int, completion: int, shape: RoutesShape) -> list[Group]:
    """All as long as they can be, with routes."""
    length = prompt + completion
    nothing = np.zeros(length, np.float32)
    mask = np.arange(length) >= prompt
    routes = np.zeros((length, shape.layers, shape.k), shape.dtype)

    def tokens(group: int, member: int) -> np.ndarray:
        """No two groups or members have tokens in common."""
        return np.where(mask, 100 * group + member + 1, 100 * group).astype(np.int32)

    rows = [
        Trajectory(
            group_id=0, member=member, group_size=size, prompt_length=prompt, tokens=tokens(0, member),
            mask=mask, logprobs=nothing, sampled_logprobs=nothing, versions=np.where(mask, 0, -1).astype(np.int32),
            temperature=1.0, finish_reason=FinishReason.LENGTH, routed_experts=routes.copy(),
        )
        for member in range(size)
    ]  # fmt: skip
    groups = [
        tuple(replace(row, group_id=number, tokens=tokens(number, row.member)) for row in rows)
        for number in range(count)
    ]
    return [
        Group(Ticket(number, 0, 0), Prompt(number, group[0].tokens[:prompt], ""), group)
        for number, group in enumerate(groups)
    ]


def test_routes_of_experts_are_part_of_the_prediction(tmp_path: Path) -> None:
    """The sampler's table, groups until they are trained, and a step of them packed: all as long as they get."""
    given = (f"model.path={MODEL}:build_experts", "rollout.max_tokens=100", "rollout.groups_per_step=3")
    config = with_file(tmp_path, [3], "algorithm.router_replay=true", *given)
    prompts, rows, members = measure_prompts(config), config.engine.max_sequences, config.rollout.group_size
    shape = RoutesShape(2, 2, 4)
    assert rows is not None and slots(config) > 3
    table = Sequences(rows, prompts.longest + 100, shape).routes
    groups = full_groups(slots(config), members, prompts.longest, 100, shape)
    held = sum(t.routed_experts.nbytes for group in groups for t in group.trajectories if t.routed_experts is not None)
    packed = pack_groups([(group, np.zeros(members)) for group in groups[:3]], 100_000)
    taken = sum(batch.routes.nbytes for batch in packed if batch.routes is not None)
    assert table is not None and taken > 0
    parts = predicted(config, prompts=prompts)
    assert parts["routes"] == pytest.approx(table.nbytes + held + taken, rel=0.01)
    assert "routes" not in predicted(with_file(tmp_path, [3], *given), prompts=prompts)

    again = with_file(tmp_path, [3], "algorithm.router_replay=true", *given, "engine.kv_after_update=recompute")
    kept = with_file(tmp_path, [3], "algorithm.router_replay=true", *given, "replay.size=5")
    token = shape.token_bytes
    assert predicted(again, prompts=prompts)["routes"] == parts["routes"] + rows * prompts.longest * token
    more = 5 * members * (prompts.longest + 100) * token
    assert predicted(kept, prompts=prompts)["routes"] == parts["routes"] + more


def test_what_does_not_fit_is_a_warning_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run goes on: the estimate may be wrong by a quarter. A dry run says the same."""
    config = with_file(tmp_path, [3])
    monkeypatch.setattr(memory, "available", lambda device, cards: 1000)
    needed = check_memory(config, torch.device("cpu"))
    words = (
        r"needs about .* free; if memory runs out, make train\.tokens_per_microbatch .*engine\.kv_positions.* smaller"
    )
    assert needed > 1000 and re.search(words + r".*kv_cache .* GiB", caplog.text, re.DOTALL)
    assert re.search("note: this run " + words, plan(config))


async def test_a_prompt_longer_than_what_was_measured_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample misses the long ones: the budget is that of short prompts, and every sequence ends all the same."""
    monkeypatch.setattr("asyncrl.data.prompts._SAMPLE_ROWS", 0)
    config = with_file(
        tmp_path, [3] * 7 + [180], "train.max_steps=2", "telemetry.report=false", "telemetry.trace=false"
    )
    async with Runtime(config) as runtime:
        engine: Any = runtime.built.ports.engine
        assert engine.kv_positions < engine.max_sequences * 188
        summary = await runtime.run()
    assert summary.version == 2
