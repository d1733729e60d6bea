"""Examples for GPUs that are not here: each has a plan (`--dry-run --assume-devices`) that fits its cards."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.main import main
from asyncrl.runtime.placement import GIB, AssumedGpus
from asyncrl.runtime.plan import plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEMPLATE = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if enable_thinking %}...{% endif %}"
# As published: hidden and inner size, layers, heads.
SIZES = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "8B": (4096, 12288, 36, 32)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of Qwen3 without weights, a small tokenizer, and a row of GSM8K."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from quickstart_model import build
    finally:
        sys.path.remove(str(EXAMPLES))
    tokenizer: Any = build(0)[1]
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("hub")
    for name, (hidden, inner, layers, heads) in SIZES.items():
        config = Qwen3Config(
            vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=name != "8B",
            architectures=["Qwen3ForCausalLM"],
        )  # fmt: skip
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "rows.jsonl").write_text('{"question": "3+4", "answer": "3+4=7\\n#### 7"}\n')
    return folder


def planned(hub: Path, cards: str, *names: str, model: str, more: tuple[str, ...] = ()) -> str:
    files = [EXAMPLES / f"{name}.yaml" for name in names]
    rows = hub / "rows.jsonl"
    given = f"model.path={hub / model}", f"data.train={rows}", f"data.eval={rows}", f"run.dir={hub}", *more
    return plan(load_config(files, given), AssumedGpus.parse(cards))


def total(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"total +([\d.]+) GiB", text)]


@pytest.mark.parametrize(
    ("cards", "names", "model", "roles", "start"),
    [
        ("1xH100", ["gsm8k"], "0.6B", "rank 0: trains on cuda:0, generates on the same", "asyncrl run"),
        ("1xH100", ["gsm8k", "gsm8k_lora_8b"], "8B", "rank 0: trains on cuda:0, generates on the same", "asyncrl run"),
        ("2xH100", ["gsm8k", "gsm8k_two_gpus"], "1.7B", "rank 0: trains on cuda:0, generates on cuda:1", "asyncrl run"),
        ("8xH100", ["gsm8k", "gsm8k_eight_gpus"], "8B", "rank 7: trains on cuda:7, generates on the same", "8 -m asyncrl"),
        (
            "2x8xH100", ["gsm8k", "gsm8k_eight_gpus", "gsm8k_two_nodes"], "8B",
            "rank 7: trains on cuda:7, generates on the same", "--nnodes 2",
        ),
    ],
)  # fmt: skip
def test_an_example_fits_its_cards(hub: Path, cards: str, names: list[str], model: str, roles: str, start: str) -> None:
    text = planned(hub, cards, *names, model=model)
    assert f"  {roles}\n" in text and re.search(rf"\nstart.*{start}", text)
    assert total(text) and max(total(text)) < 0.97 * 80 and "this run needs about" not in text
    assert "matrix products in bfloat16 on cuda" in text
    if model == "1.7B":
        # Both halves of the board on each card, as the trainer's own.
        assert len(set(re.findall(r"  copies +([\d.]+) GiB", text))) == 1 and text.count("  copies ") == 2


def test_what_is_left_out_is_chosen_by_the_card(hub: Path) -> None:
    one = planned(hub, "1xH100", "gsm8k", model="0.6B")
    assert "train.tokens_per_microbatch: 16384 (left out; chosen for H100)" in one and "\n  sharding: replicate" in one
    small = planned(hub, "1xL4", "gsm8k", model="0.6B", more=("engine.kv_positions=20000", "rollout.group_size=4"))
    assert "train.tokens_per_microbatch: 16384" in small
    tight = planned(hub, "1xL4", "gsm8k", model="0.6B", more=("train.gradient_checkpointing=false",))
    assert "train.tokens_per_microbatch: 2048" in tight and "this run needs about" in tight
    given = planned(hub, "1xL4", "gsm8k", model="0.6B", more=("train.tokens_per_microbatch=1024",))
    assert "tokens_per_microbatch: 1024\n" in given and "left out" not in given
    large = planned(hub, "8xH100", "gsm8k", model="8B")
    assert "distributed.sharding: fsdp (left out; replicate takes 137 GiB for the state on each H100)" in large
    cannot = planned(hub, "8xH100", "gsm8k", "gsm8k_lora_8b", model="8B")
    assert "\n  sharding: replicate" in cannot


def test_where_one_row_is_longer_than_the_usual_microbatch_it_is_the_microbatch(hub: Path) -> None:
    long = planned(hub, "1xB200", "gsm8k", model="0.6B", more=("rollout.max_tokens=20000",))
    assert "tokens_per_microbatch: 20512" in long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--assume-devices", "8xH100"], "add --dry-run"),
        (["--dry-run", "--assume-devices", "8"], "write COUNTxCARD or NODESxCOUNTxCARD"),
        (["--dry-run", "--assume-devices=0xH100"], "write COUNTxCARD"),
        (["--dry-run", "--assume-devices"], "is ''"),
        (["--dry-run", "--assume-devices", "8xTPU"], "A10, A100"),
        (["model.device=cpu", "--dry-run", "--assume-devices", "8xH100"], "on model.device cpu"),
        (["generation.devices=[cuda:0]", "--dry-run", "--assume-devices", "1xH100"], "left to train on"),
    ],
)
def test_what_cannot_be_assumed_is_refused(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(EXAMPLES / "quickstart.yaml"), f"run.dir={tmp_path}", *arguments]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_the_memory_of_a_card_is_that_of_its_data_sheet() -> None:
    gpus = AssumedGpus.parse("2x8xh200")
    assert (gpus.nodes, gpus.count, gpus.name, gpus.memory(None) // GIB) == (2, 8, "H200", 141)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("3+4=7\n#### 7", 1),
        ("#### 7.0", 1),
        ("#### 1\n#### 7", 1),
        ("#### $7", 1),
        ("7", 0),
        ("#### 70", 0),
        ("####", 0),
    ],
)
def test_the_reward_reads_the_number_behind_the_last_four_signs(text: str, score: int) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gsm8k_rewards import correct
    finally:
        sys.path.remove(str(EXAMPLES))
    assert correct([[{"role": "assistant", "content": text}], text], ["...\n#### 7"] * 2) == [score, score]
    assert correct(["#### 1,234"], ["#### 1234"]) == [1]
