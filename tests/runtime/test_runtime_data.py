"""The user's own data in five lines of YAML, and every setting of the algorithm in a real run of a few steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from runtime_helpers import FAST as QUIET
from runtime_helpers import MODEL, REAL, REWARDS, metrics_of, rollouts_of, train, write_yaml
from runtime_model import rows

from asyncrl.cli.prompts import main as show_prompts
from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.runtime.runtime import Runtime

Metrics = Mapping[str, float]
FAST: dict[str, Any] = REAL | QUIET


def steps_of(summary: Any) -> list[Metrics]:
    """The metrics of the steps, each checked to be finite."""
    lines = [metrics for _, metrics in summary.history if "loss" in metrics]
    for line in lines:
        bad = {name: value for name, value in line.items() if not math.isfinite(value)}
        assert not bad, bad
    assert any(line["optim/grad_norm"] > 0 for line in lines)
    return lines


def write_jsonl(path: Path, data: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def chat_rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows(8)]


async def test_five_lines_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside the YAML are found wherever the run is started."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    write_jsonl(home / "train.jsonl", rows())
    (home / "user.py").write_text(MODEL.read_text())
    (home / "rewards.py").write_text(REWARDS.read_text())
    text = """\
model: {path: "user.py:build"}
data: {train: train.jsonl, max_prompt_tokens: 12}
reward: rewards.py:share
rollout: {group_size: 4, groups_per_step: 4, max_tokens: 8}
train: {lr: 1.0e-2, max_steps: 2, tokens_per_microbatch: 128}
"""
    (home / "x.yaml").write_text(text)
    monkeypatch.chdir(elsewhere)
    async with Runtime(load_config([home / "x.yaml"], ["threads=1", "telemetry.live=off"])) as runtime:
        summary = await runtime.run()
    assert summary.version == 2
    assert len(steps_of(summary)) == 2
    assert {row["prompt"] for row in rollouts_of(elsewhere / "runs/run")} <= {row["prompt"] for row in rows()}


async def test_a_directory_of_datasets(tmp_path: Path) -> None:
    """What `datasets.Dataset.save_to_disk` leaves behind, without the package: an Arrow stream and two JSON files."""
    place, table = tmp_path / "train.datasets", pa.Table.from_pylist(rows())
    place.mkdir()
    with pa.OSFile(f"{place}/data-00000-of-00001.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (place / "dataset_info.json").write_text("{}")
    summary = await train(tmp_path, f"data.train={place}", "train.max_steps=1", base=FAST)
    assert summary.version == 1
    assert {(row["prompt"], row["prompt"][0]) for row in rollouts_of(tmp_path / "runs/run")} <= {
        (row["prompt"], row["answer"]) for row in rows()
    }


@pytest.mark.parametrize(("given", "live"), [("None", "off"), ("0.25", "plain")])
async def test_rewards_that_teach_nothing_are_said_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, given: str, live: str
) -> None:
    """On the terminal, or in the log where nothing else is shown; in the metrics; in the report."""
    (tmp_path / "flat.py").write_text(f"def flat(completions):\n    return [{given}] * len(completions)\n")
    overrides = [
        f"reward={tmp_path}/flat.py:flat",
        "telemetry.report=true",
        "train.max_steps=4",
        "rollout.max_tokens=3",
    ]
    said = "no completion had a reward" if given == "None" else f"every reward was {given}"
    await train(tmp_path, *overrides, f"telemetry.live={live}", base=FAST)
    shown = capsys.readouterr().out if live == "plain" else caplog.text
    assert shown.count(f"{said} for 3 steps in a row") == 1 and "likely reason: " in shown
    run = tmp_path / "runs/run"
    assert [line["reward/steps_without_signal"] for line in metrics_of(run)] == [1, 2, 3, 4]
    assert f"Until step 4: {said}" in (run / "report.html").read_text("utf-8")


async def test_verls_rows_and_its_reward_as_they_are(tmp_path: Path) -> None:
    """A directory of parquet files with verl's columns, and `compute_score` beside it."""
    made = [
        {"data_source": "letters", "prompt": row["prompt"], "extra_info": {"index": index}}
        | {"reward_model": {"style": "rule", "ground_truth": row["answer"]}}
        for index, row in enumerate(rows())
    ]
    (tmp_path / "data").mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(pa.Table.from_pylist(made[part::2]), tmp_path / f"data/train-{part}.parquet")
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': solution_str.count(ground_truth) + 100 * extra_info['index'], 'acc': 0.0}\n"
    )
    overrides = (f"data.train={tmp_path}/data", f"reward={tmp_path}/score.py:compute_score", "train.max_steps=1")
    assert (await train(tmp_path, *overrides, base=FAST)).version == 1
    index = {row["prompt"]: row["extra_info"]["index"] for row in made}
    truth = {row["prompt"]: row["reward_model"]["ground_truth"] for row in made}
    for row in rollouts_of(tmp_path / "runs/run"):
        assert row["reward"] % 100 == row["completion"].count(truth[row["prompt"]])
        assert row["reward"] // 100 == index[row["prompt"]]


async def test_the_rendered_prompt_is_seen_before_and_after_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`asyncrl prompts`, `rollouts/` and the report show what the model read, special tokens included."""
    place = write_jsonl(tmp_path / "chat.jsonl", chat_rows())
    chat = [f"data.train={place}", f"model.path={MODEL}:build_chat", "data.chat_template_kwargs.thinking=false"]
    overrides = [*chat, "train.max_steps=1", "telemetry.report=true", f"run.dir={tmp_path}/runs"]
    file = write_yaml(tmp_path, FAST)
    assert show_prompts([str(file), *overrides, "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("<eos>[end of prompt]") == 2 and "tokens; other columns: answer" in shown
    await train(tmp_path, *overrides, base=FAST)
    found = {(row["prompt"][0]["content"], row["rendered_prompt"]) for row in rollouts_of(tmp_path / "runs/run")}
    assert found and all(rendered == f"[{text}]=<eos>" for text, rendered in found)
    assert "]=\\u003ceos>" in (tmp_path / "runs/run/report.html").read_text("utf-8")


@pytest.mark.parametrize("policy", ["skip", "cut", "refuse"])
async def test_overlong_prompts_are_skipped_cut_or_refused_and_counted(tmp_path: Path, policy: str) -> None:
    long = [{"prompt": "abcdefgha3=", "answer": "a"}]
    place = write_jsonl(tmp_path / "long.jsonl", [*rows(6), *long, *rows(6), *long])
    overrides = (f"data.train={place}", "data.max_prompt_tokens=4", f"data.overlong={policy}", "train.max_epochs=1")
    overrides = *overrides, "train.max_steps=null"
    if policy == "refuse":
        with pytest.raises(DataError, match="row 7"):
            await train(tmp_path, *overrides, base=FAST)
        return
    summary = await train(tmp_path, *overrides, base=FAST)
    last = steps_of(summary)[-1]
    assert (last["data/skipped"], last["data/cut"]) == ((2, 0) if policy == "skip" else (0, 2))
    assert summary.books.trained == last["data/delivered"] == (12 if policy == "skip" else 14)
    prompts = [row["prompt_length"] for row in rollouts_of(tmp_path / "runs/run")]
    assert max(prompts) == (3 if policy == "skip" else 4)


async def test_several_rewards_with_weights(tmp_path: Path) -> None:
    functions = [
        {"function": f"{REWARDS}:share", "weight": 1.0, "name": "letters"},
        {"function": f"{REWARDS}:short", "weight": 0.5},
    ]
    summary = await train(tmp_path, base=FAST | {"reward": {"functions": functions, "workers": 2}})
    for line, (version, _) in zip(steps_of(summary), summary.history, strict=True):
        trained = [row for row in rollouts_of(tmp_path / "runs/run") if row["trained_version"] == version - 1]
        letters = [row["components"]["letters"] for row in trained]
        brief = [row["components"]["short"] for row in trained if row["components"]["short"] is not None]
        assert line["reward/letters/mean"] == pytest.approx(sum(letters) / len(letters))
        assert line["reward/short/mean"] == pytest.approx(sum(brief) / len(brief))
        for row in trained:
            expected = row["components"]["letters"] + 0.5 * (row["components"]["short"] or 0.0)
            assert row["reward"] == pytest.approx(expected)
            assert (row["components"]["short"] is None) == (len(row["completion"]) % 2 == 1)


@pytest.mark.parametrize("most", ["null", "200"])
async def test_epochs_end_a_run_with_a_partial_step(tmp_path: Path, most: str) -> None:
    """And its schedule, also if `train.max_steps` would allow more."""
    base = FAST | {"rollout": FAST["rollout"] | {"groups_per_step": 7}}
    limits = f"train.max_steps={most}", "train.max_epochs=0.75", "train.schedule=linear", "train.lr=3.0"
    summary = await train(tmp_path, *limits, base=base)
    assert [line["train/groups"] for line in steps_of(summary)] == [7, 7, 4]  # 18 of 24 rows
    assert [line["optim/lr"] for line in steps_of(summary)] == pytest.approx([3, 2, 1])
    assert steps_of(summary)[-1]["train/sequences"] == 16


async def test_a_time_limit_ends_a_run_after_the_step_in_progress(tmp_path: Path) -> None:
    limits = "train.max_steps=null", "train.time_limit_s=0.5", "checkpoint.every=1000000"
    summary = await train(tmp_path, *limits, base=FAST)
    assert summary.version >= 1 and summary.seconds < 30
    assert summary.books.trained == 4 * summary.version
    assert (tmp_path / f"runs/run/checkpoints/step_{summary.version}").is_dir()


async def test_evaluation_before_every_n_and_after(tmp_path: Path) -> None:
    """Greedy evaluation of the same weights gives the same numbers: the eval of version 2 is that of its checkpoint."""
    tree = FAST | {
        "evaluate": {"every": 2, "samples": 2, "temperature": 0, "pass_reward": 0.2},
        "checkpoint": {"every": 2},
    }
    tree["data"] = FAST["data"] | {"eval": f"{MODEL}:held_out"}
    await train(tmp_path, "train.max_steps=5", "checkpoint.keep=0", base=tree)
    lines = {line["step"]: line for line in metrics_of(tmp_path / "runs/run")}
    name = "eval/single_turn"
    assert [step for step in lines if f"{name}/avg@2" in lines[step]] == [0, 2, 4, 5]
    for step in (0, 2, 4, 5):
        line = lines[step]
        assert 0 <= line[f"{name}/avg@2"] <= 1 and 0 <= line[f"{name}/pass@2"] <= 1
        assert line[f"{name}/share/mean"] == pytest.approx(line[f"{name}/avg@2"])
    assert set(lines[0]) == {"step", "time", *(key for key in lines[2] if key.startswith("eval/"))}
    for step in (2, 4):
        again = tree | {"model": {"path": f"{tmp_path}/runs/run/checkpoints/step_{step}", "dtype": "float32"}}
        again |= {"run": {"name": f"e{step}"}}
        summary = await train(tmp_path, "train.max_steps=1", base=again)
        version, metrics = summary.history[0]
        assert version == 0
        assert {key: lines[step][key] for key in metrics} == pytest.approx(dict(metrics))


# Losses: test_runtime_methods.
VARIANTS: dict[str, list[str]] = {
    "two updates, gspo, kl": ["algorithm.updates_per_batch=2", "algorithm.loss=gspo", "algorithm.kl.coef=0.05"],
    "sampler log-probs, recompute": ["algorithm.old_logprobs=sampler", "engine.kv_after_update=recompute"],
    "bfloat16, checkpointing": ["model.dtype=bfloat16", "train.gradient_checkpointing=true"],
    "filters": [
        "preset=one_off",
        "rollout.top_p=0.9",
        "rollout.top_k=5",
        "rollout.temperature=0.8",
        "rollout.late=drop",
    ],
    "one off, small engine and cache": [
        "preset=one_off",
        "engine.max_sequences=6",
        "engine.prefill_tokens=8",
        "engine.kv_positions=40",
    ],
    "cosine": ["train.schedule=cosine", "train.warmup_steps=1", "train.weight_decay=0.1", "train.grad_clip=null"],
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_every_variant_trains(tmp_path: Path, variant: str) -> None:
    summary = await train(tmp_path, *VARIANTS[variant], "train.max_steps=4", base=FAST)
    lines = steps_of(summary)
    updates = 2 if "two updates" in variant else 1
    assert summary.version == 4 * updates and len(lines) == 4
    assert summary.books.trained == 16
    assert max(line["staleness/max"] for line in lines) <= 2 * updates
    weights = json.loads((tmp_path / f"runs/run/checkpoints/step_{summary.version}/config.json").read_text())
    assert weights["dtype"] == ("bfloat16" if "bfloat16" in variant else "float32")
    if "kl" in variant:
        assert lines[0]["kl"] > 0 and lines[-1]["kl"] > 1e-6 and lines[-1]["time/logprobs"] > 0
    if variant == "cosine":
        assert [line["optim/lr"] for line in lines] == pytest.approx([0, 0.01, 0.0075, 0.0025])
