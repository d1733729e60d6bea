"""Memory of a run before it starts: forecasts beside measured peaks, the budget of the cache, and a warning if memory is short."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import REAL, config_of
from transformers import AutoConfig

from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config, DistributedConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_sources import load_rows
from asyncrl.distributed.world import World
from asyncrl.generation.embedded.engine import EmbeddedEngine, cache_shape
from asyncrl.models.loading import adapter_sizes, describe_module
from asyncrl.models.paths import FUSED, PACKED, PATHS, PLAIN
from asyncrl.models.reward_model import predict_sizes
from asyncrl.runtime import memory
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.runtime.inputs import measure_prompts
from asyncrl.runtime.memory import Cut, cut_model, kv_positions, predicted
from asyncrl.runtime.placement import GIB, Gpus, Placement
from asyncrl.runtime.plan import plan
from asyncrl.runtime.runtime import Runtime

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import context
from measure.memory import CASES, MIB, kinds, measure, measured_on

PAGE = Path(__file__).resolve().parents[2] / "tools/results/memory.md"
LINES, ROWS = PAGE.read_text().splitlines(), list(measured_on(PAGE))
SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
)


# -- the formula -------------------------------------------------------------------------------------------------------


def forecast(folder: Path, kind: str = "llama", model: dict[str, Any] | None = None, **given: Any) -> Config:
    """The configuration of a run with a model of this kind. `model`: its sizes. `given`: settings, some by short names."""
    AutoConfig.for_model(kind, **SIZES | (model or {})).save_pretrained(folder)
    sizes = {"prompt": 4, "completion": 6, "tokens": 100, "dtype": "float32", "rank": 0, "engine": {}, **given}
    names = ("algorithm", "distributed", "reward")
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": sizes["dtype"], "device": "cpu", "lora": {"rank": sizes["rank"]}},
            "train": {"tokens_per_microbatch": sizes["tokens"]},
            "data": {"max_prompt_tokens": sizes["prompt"]},
            "rollout": {"max_tokens": sizes["completion"]},
            "engine": {"max_sequences": 3} | sizes["engine"],
            **{name: given[name] for name in names if name in given},
        }
    )


@pytest.mark.parametrize(("case", "dtype"), dict.fromkeys(row[1:3] for row in ROWS))
def test_a_peak_that_was_measured_is_predicted(case: str, dtype: str) -> None:
    """Within a quarter: paths, dtypes, experts, windows, a convolution, a scan, adapters, a reference, two gradient buffers, fsdp.
    A microbatch of fsdp is measured together with gathered weights. The page shows the prediction of today."""
    found = kinds(CASES[case], dtype)
    for line, *row, part, peak in ROWS:
        if row == [case, dtype]:
            assert float(LINES[line].split("|")[4]) == pytest.approx(found[part] / MIB, abs=0.6)
            if part == "all" or (part == "microbatch" and not CASES[case].fsdp):
                assert found[part] / MIB == pytest.approx(peak, rel=0.25)


def test_the_peak_of_a_gpu_is_predicted(tmp_path: Path) -> None:
    """A microbatch of 15,359 tokens of the shape of Qwen3-0.6B in bfloat16 on one H200: 20.76 GiB, of which masters, gradients and
    the working copy take 10 bytes a parameter (`microbatch` in tools/results/gpu_check_h200_5.jsonl). Norms of queries and keys
    keep what they read: without it the prediction was 0.77."""
    sizes = dict(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    config = forecast(tmp_path, "qwen3", sizes, dtype="bfloat16", tokens=15_359, prompt=128, completion=256)
    on_a_card = Placement((), 1, 1, "", torch.device("cuda", 0))
    parts = predicted(config, path=FUSED, placement=on_a_card)
    state = 10 * 596_049_920
    assert parts["weights"] + parts["gradients"] + parts["copies"] == state
    assert parts["microbatch"] == pytest.approx(20.76 * GIB - state, rel=0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of a process are read from Linux's /proc")
@pytest.mark.parametrize("case", ["small qwen3_moe, fused, checkpointing", "small deepseek_v3, plain sdpa, long rows"])
def test_the_peak_of_a_process_is_predicted(case: str) -> None:
    found = measure(case, "float32", only_microbatch=True)
    assert found["path"].startswith(CASES[case].path)
    for part in ("weights", "microbatch"):
        assert found["predicted"][part] == pytest.approx(found["measured"][part], rel=0.25)


def test_the_memory_of_ranks_that_share_microbatches_is_predicted() -> None:
    """Within a quarter. Two ranks of 8,192 tokens took at most 0.6 of one rank, and that is predicted too."""
    text = (PAGE.parent / "context.md").read_text()
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) : (\d+) = \S+ : \S+ \| (\d+) : (\d+) =", text, re.MULTILINE
    )
    assert len(rows) == len(context.CASES)
    for tokens, row, ranks, one, several, *shown in (map(int, cells) for cells in rows):
        found = [context.predict(tokens, row, sharing) / MIB for sharing in (1, ranks)]
        assert found == pytest.approx([one, several], rel=0.25) and found == pytest.approx(shown, abs=0.6)
        if (tokens, ranks) == (8192, 2):
            assert max(several / one, found[1] / found[0]) <= 0.6


def test_weights_and_copies_follow_from_the_parameters(tmp_path: Path) -> None:
    model = {"vocab_size": 1000, "num_hidden_layers": 2, "tie_word_embeddings": True}
    count = 1000 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 2 * 2 * 64 + 64

    def weights(ranks: int = 1, cut: Cut | None = None, **given: Any) -> list[int]:
        parts = predicted(forecast(tmp_path, model=model, **given), ranks, cut=cut)
        return [parts[name] for name in ("weights", "gradients", "optimizer", "copies")]

    assert weights() == [4 * count, 4 * count, 8 * count, 0]
    assert weights(dtype="bfloat16") == [4 * count, 4 * count, 8 * count, 2 * count]
    reference = {"kl": {"coef": 0.1}}
    assert weights(dtype="bfloat16", algorithm=reference) == [4 * count, 4 * count, 8 * count, 4 * count]
    adapters, merged = adapter_sizes(forecast(tmp_path, model=model, rank=3).model)
    frozen = 2 * count + 4 * adapters
    assert weights(dtype="bfloat16", rank=3) == [frozen, 4 * adapters, 8 * adapters, 2 * (adapters + merged)]
    for ranks in (2, 4):
        sharded = weights(ranks, distributed={"sharding": "fsdp"})
        assert sharded[:3] == [each // ranks for each in (4 * count, 4 * count, 8 * count)]
        kept = weights(ranks, Cut(ranks, True), distributed={"sharding": "fsdp"})
        assert kept[3] - sharded[3] == 8 * count and sharded[3] > 4 * count


def test_caches_are_predicted_by_what_a_layer_holds(tmp_path: Path) -> None:
    config = forecast(tmp_path, "qwen3", {"num_hidden_layers": 3, "head_dim": 16}, dtype="bfloat16")
    shape = cache_shape(describe_module(config.model).config, 1, 30)
    assert predicted(config)["cache"] == shape.nbytes(torch.bfloat16)
    fewer = forecast(tmp_path, "qwen3", {"num_hidden_layers": 3, "head_dim": 16}, engine={"kv_positions": 12})
    assert predicted(fewer)["cache"] == 2 * shape.nbytes(torch.bfloat16) * 12 // 30
    hybrid = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
    assert predicted(forecast(tmp_path, "lfm2", hybrid))["cache"] == 30 * 2 * 2 * 16 * 4
    latent = {"num_hidden_layers": 2, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    assert predicted(forecast(tmp_path, "deepseek_v3", latent))["cache"] == 2 * 30 * (24 + 8) * 4


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("llama", {}, "fused"),
        ("arcee", {}, "packed"),
        ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}, "plain"),
    ],
)
def test_a_path_that_nobody_knows_yet_is_guessed(
    tmp_path: Path, kind: str, settings: dict[str, Any], words: str
) -> None:
    config = forecast(tmp_path, kind, settings)
    assert predicted(config) == predicted(config, path=next(each for each in PATHS if each.name == words))


def test_experts_count_as_many_as_a_token_goes_to(tmp_path: Path) -> None:
    few = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    sizes = [
        predicted(forecast(tmp_path / str(number), "qwen3_moe", few | more), path=FUSED)["microbatch"]
        for number, more in enumerate([{}, {"num_experts": 64}, {"num_experts_per_tok": 4}])
    ]
    assert sizes[0] == sizes[1] and sizes[2] > 1.2 * sizes[0]


def test_attention_keeps_the_weights_of_short_rows_on_a_cpu(tmp_path: Path) -> None:
    gpu = memory.Placement((), 1, 1, "", torch.device("cuda", 0))

    def microbatch(completion: int, **given: Any) -> int:
        return predicted(forecast(tmp_path, prompt=64, completion=completion, tokens=8192), **given)["microbatch"]

    assert microbatch(400, path=FUSED) > 1.5 * microbatch(8000, path=FUSED) == 1.5 * microbatch(2000, path=FUSED)
    assert microbatch(8000, path=PLAIN[1]) > 3 * microbatch(2000, path=PLAIN[1])
    assert microbatch(400, path=FUSED, placement=gpu) == microbatch(8000, path=FUSED, placement=gpu)


# -- runs --------------------------------------------------------------------------------------------------------------


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
    assert by_prompts["cache"] / by_limit["cache"] == pytest.approx(room / (sequences * 508))
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


def test_the_path_and_the_ranks_are_part_of_a_prediction(tmp_path: Path) -> None:
    config = with_file(tmp_path, [3])
    sizes = [predicted(config, path=path)["microbatch"] for path in (None, PACKED, PLAIN[1])]
    assert sizes[0] < sizes[1] < sizes[2]
    shared = config.model_copy(update={"distributed": DistributedConfig(context=2)})
    assert predicted(shared, 2)["microbatch"] < 0.7 * sizes[0]


def test_a_rank_that_generates_has_reward_models(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[1] / "models/models_reward.py"
    config = forecast(tmp_path, reward={"model": [{"path": f"{source}:mean", "dtype": "float64"}] * 2})
    sizes = predict_sizes(config.reward.model[0], "float32", 100)
    parts = predicted(config)
    assert parts["reward_models"] == 2 * sizes.weights + sizes.activations > 2 * 47 * 8 * 8
    trains = memory.Placement((), 1, 1, "", torch.device("cpu"), generates=False)
    assert predicted(config, placement=trains).keys() == parts.keys() - {"cache", "reward_models"}


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

    class Gpu(Gpus):
        def memory(self, device: torch.device) -> int:
            return int(needed / 0.85) + 1

    assert cut_model(config, torch.device("cuda:0"), world, None, Gpu()) == cut


async def test_what_does_not_fit_is_a_warning_with_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run goes on: the estimate may be wrong by a quarter. A dry run says the same."""
    config = with_file(tmp_path, [3], "train.max_steps=1")
    monkeypatch.setattr(memory, "_meminfo", lambda name: 1000)
    words = (
        r"needs about .* free; if memory runs out, make train\.tokens_per_microbatch .*engine\.kv_positions.* smaller"
    )
    assert re.search("note: this run " + words, await asyncio.to_thread(plan, config))
    async with Runtime(config, write=False) as runtime:
        assert (await runtime.run()).version == 1
    assert re.search(words + r".*cache .* GiB", caplog.text, re.DOTALL)


@pytest.mark.parametrize(
    ("generate", "kinds_of_ranks"), [(0, ["rank 0", "a node that joins"]), (1, ["rank 0", "rank 1"])]
)
def test_a_dry_run_predicts_what_a_node_that_joins_needs(
    tmp_path: Path, generate: int, kinds_of_ranks: list[str]
) -> None:
    """Like a rank that only generates, if the run has none."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "aa", "answer": "1"}\n')
    given = (f"data.train={tmp_path / 'train.jsonl'}", "distributed.listen=127.0.0.1:0", "distributed.roles.train=1")
    text = plan(config_of(tmp_path, *given, f"distributed.roles.generate={generate}", base=REAL))
    assert re.findall("predicted memory of (.*):", text) == kinds_of_ranks
    last = text.rpartition("predicted memory of")[2]
    assert re.findall(r"^  (\w+) +\S+ GiB", last, re.MULTILINE) == ["copies", "cache", "workers", "libraries", "total"]


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
