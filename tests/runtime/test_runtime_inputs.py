"""What is wrong with a run's inputs is told before anything is made or loaded, all at once, and in a dry run too."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import DRY, MODEL, REAL, REWARDS, ROOT, metrics_of, write_yaml

from asyncrl.config import hub
from asyncrl.errors import ConfigError
from asyncrl.main import main

AGENTS = Path(__file__).with_name("runtime_agents.py")
NEVER = {"path": f"{MODEL}:build_never"}  # raises: the model may not be asked for


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_everything_that_is_missing_is_named_at_once_and_nothing_is_made(
    here: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    tree = REAL | {
        "model": {"path": "./nope"},
        "data": {"train": "nope.jsonl", "eval": "no_eval.parquet", "max_prompt_tokens": 12},
        "evaluate": {"every": 1},
        "reward": ["nope.py:reward", f"{REWARDS}:share"],
        "rollout": REAL["rollout"] | {"environment": "play.py:Play"},
    }
    assert main([str(write_yaml(here, tree)), *more]) == 2
    error = capsys.readouterr().err
    for words in (
        "model.path: there is no directory './nope'",
        "data.train: the prompt file nope.jsonl does not exist",
        "data.eval: the prompt file no_eval.parquet does not exist",
        "reward.functions: there is no file nope.py",
        "rollout.environment: there is no file play.py",
    ):
        assert words in error
    assert error.count("\n") == 5 and not (here / "runs").exists()


def played(environment: str, **settings: Any) -> dict[str, Any]:
    return {"rollout": REAL["rollout"] | {"environment": environment} | settings}


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"reward": f"{REWARDS}:shar"}, "did you mean 'share'"),
        ({"reward": "rewards.py"}, "'rewards.py' is not an address of user code; write `file.py:name`"),
        (played(f"{MODEL}:Thinkin"), "did you mean 'Thinking'"),
        (played(f"{AGENTS}:plain"), "write `async def episode(task, policy)`"),
        (played(f"{AGENTS}:one_argument"), "expected `async def episode"),
        (played(f"{AGENTS}:Desk"), "Desk' has no `async def run(self, prompt"),
        *(
            (
                played(f"{MODEL}:Thinking", **{name: 3}),
                f"rollout.{name} is for `async def episode(task, policy)`, but env",
            )
            for name in ("max_turns", "tool_timeout_s")
        ),
        ({"hooks": f"{MODEL}:build"}, "a function; expected an asyncrl.Hooks"),
        ({"data": REAL["data"] | {"train": "empty.jsonl"}}, "empty.jsonl holds no rows"),
        ({"data": REAL["data"] | {"train": "other.jsonl"}}, "other.jsonl row 1 has no column 'prompt'; found question"),
        ({"data": REAL["data"] | {"train": "null.jsonl"}}, "null.jsonl row 2: the prompt is NoneType; expected a str"),
        ({"data": REAL["data"] | {"train": "late.jsonl"}}, "late.jsonl row 2 has no column 'prompt'; found question"),
        ({"data": REAL["data"] | {"train": "chat.jsonl"}}, "chat.jsonl row 2: message 1 of the prompt is"),
        ({"data": REAL["data"] | {"train": f"{MODEL}:row"}}, "has no 'row'; did you mean 'rows'"),
        ({"model": {"path": f"{MODEL}:buil"}}, "has no 'buil'; did you mean 'build'"),
    ],
)
def test_it_is_told_without_the_model(
    here: Path, capsys: pytest.CaptureFixture[str], setting: dict[str, Any], words: str, more: list[str]
) -> None:
    good, rows = '{"prompt": "a3="}\n', {"null": '{"prompt": null}', "chat": '{"prompt": [{"role": "user"}]}'}
    rows = {name: f"{good}{row}\n" for name, row in (rows | {"late": '{"question": "?"}'}).items()}
    for name, text in (rows | {"empty": "", "other": '{"question": "?"}\n'}).items():
        (here / f"{name}.jsonl").write_text(text)
    assert main([str(write_yaml(here, REAL | {"model": NEVER} | setting)), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_mistake_does_not_stand_in_the_way_of_its_correction(here: Path) -> None:
    """Nor does it cost the run that was there."""
    (here / "rows.jsonl").write_text('{"prompt": "a3="}\n' * 8)
    file = str(write_yaml(here, DRY))
    assert main([file, "train.max_steps=2"]) == 0
    assert main([file, "run.overwrite=true", "data.train=row.jsonl"]) == 2
    assert len(metrics_of(here / "runs/run")) == 2
    assert main([file, "run.overwrite=true", "data.train=rows.jsonl"]) == 0
    assert len(metrics_of(here / "runs/run")) == 3


@pytest.mark.parametrize("path", ["./nope", "runs/nope", "~/nope-of-asyncrl", "/nope", "a/b/c", "run.yaml"])
def test_a_path_that_looks_local_is_not_looked_for_on_the_hub(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **more: asked.append(address))
    (here / "runs").mkdir()
    for setting in ("model.path", "model.tokenizer"):
        assert main([str(write_yaml(here, REAL)), f"model.path={MODEL.parent}", f"{setting}={path}"]) == 2
        what = "%r is not a directory: it is a file" if path == "run.yaml" else "there is no directory %r"
        assert f"{setting}: {what % os.path.expanduser(path)}" in capsys.readouterr().err
    assert asked == []


COUNTING = """
from pathlib import Path
from runtime_model import build as build_model

def build(seed):
    with Path("calls").open("a") as file:
        file.write("x")
    return build_model(seed)
"""


def test_files_are_read_once_and_a_builder_is_called_for_shapes_and_for_weights(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    inside = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return inside(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    (here / "rows.jsonl").write_text('{"prompt": "a3=", "answer": "a"}\n' * 8)
    (here / "model.py").write_text(COUNTING)
    own = "data.train=rows.jsonl", "model.path=model.py:build", "train.max_steps=1"
    for name, calls in (("one", 2), ("two", 4)):
        assert main([str(write_yaml(here, REAL)), *own, f"run.name={name}"]) == 0
        assert (here / "calls").read_text() == "x" * calls
    assert read.count("rows.jsonl") == 2


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_packages_that_settings_need_are_looked_for_first_and_told_together(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """As in an environment that has none of the extras."""
    extras = ("wandb", "mlflow", "sqlalchemy", "alembic", "peft", "aiohttp", "vllm", "liger_kernel")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in extras else find(name, *rest))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tree = REAL | {
        "model": NEVER | {"lora": {"rank": 2}, "head_kernel": "liger"},
        "telemetry": {"live": "off", "sinks": ["wandb", "mlflow"]},
        "generation": {"placement": "worker", "engine": "vllm"},
        "door": {"ring": "inputs", "http_port": 0},
        "data": {"max_prompt_tokens": 12},
    }
    assert main([str(write_yaml(here, tree)), *more]) == 2
    said = capsys.readouterr().err
    for words in (
        f"telemetry.sinks has 'wandb', and the package wandb is not installed: `pip install -e '{ROOT}[wandb]'`",
        f"telemetry.sinks has 'mlflow', and the package mlflow is not installed: `pip install -e '{ROOT}[mlflow]'`",
        "telemetry.sinks has 'mlflow', whose store is an SQLite file, and the package alembic is not installed",
        f"model.lora.rank is set, and the package peft is not installed: `pip install -e '{ROOT}[lora]'`",
        f"model.head_kernel is liger, and the package liger_kernel is not installed: `pip install -e '{ROOT}[liger]'`",
        f"door.http_port is set, and the package aiohttp is not installed: `pip install -e '{ROOT}[http]'`",
        "generation.engine is vllm, and vLLM is not installed here",
    ):
        assert words in said, said
    assert said.count("\n") == 8 and not (here / "runs").exists()


REWARDS = """
def correct(completions, solution, **columns):
    return [0.0 for _ in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
def score_answer(answer, entry):
    return 0.0
"""


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "correct",
            "correct: it needs 'solution'; the columns of the data are: answer; a reward function may also take: api",
        ),
        ("compute_score", "compute_score: it has verl's signature and needs the columns data_source, ground_truth"),
        ("score_answer", "score_answer: it scores entries of a reasoning-gym data set (question, answer, metadata)"),
    ],
)
def test_columns_that_a_reward_needs_are_looked_for_without_the_model(
    here: Path, capsys: pytest.CaptureFixture[str], function: str, words: str, more: list[str]
) -> None:
    (here / "rewards.py").write_text(REWARDS)
    column = "question" if function == "score_answer" else "answer"
    (here / "rows.jsonl").write_text(f'{{"prompt": "a3="}}\n{{"prompt": "a4=", "{column}": "a"}}\n')
    tree = REAL | {"model": NEVER, "reward": f"rewards.py:{function}", "data": REAL["data"] | {"train": "rows.jsonl"}}
    assert main([str(write_yaml(here, tree)), *more]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and said.count("\n") == 1


@pytest.mark.parametrize("path", ["an/other", "other"])
def test_a_hub_that_does_not_answer_is_told_at_once(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Its libraries would try for most of a minute, for each of these. Here nobody listens, or somebody who never answers."""
    settings = [f"{setting}={path}" for setting in ("model.path", "model.tokenizer", "reward.model", "data.train")]
    file = str(write_yaml(here, {key: value for key, value in REAL.items() if key != "reward"}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(hub, "_TIMEOUT_S", 0.3)
        assert main([file, *settings]) == 2
    said = capsys.readouterr().err
    missing = f"there is no directory '{path}' (looked from {here}), and as a model of the hub it cannot"
    for setting in ("model.path", "model.tokenizer", "reward.model"):
        assert f"{setting}: {missing}" in said
    assert f"http://127.0.0.1:{port} does not answer (" in said and "name a directory, or start where the hub" in said
    assert "data.train: " in said and said.count("\n") == 4
    monkeypatch.setenv("HF_ENDPOINT", f"http://localhost:{port}")  # closed now
    assert main([file, *settings]) == 2
    assert "does not answer ([Errno 111] Connection refused)" in capsys.readouterr().err


def test_a_model_that_was_downloaded_needs_no_hub(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    (here / "models--an--other/snapshots/1").mkdir(parents=True)
    (here / "models--an--other/refs").mkdir()
    (here / "models--an--other/refs/main").write_text("1")
    with caplog.at_level("WARNING"):
        for setting in ("model.path", "model.tokenizer"):
            hub.require_hub("an/other", setting)
    assert caplog.text.count("set HF_HUB_OFFLINE=1 to skip the retries") == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.require_hub("an/other", "model.path")
    words = r"'not/there' .*HF_HUB_OFFLINE is set, and the model was not downloaded before; name"
    with pytest.raises(ConfigError, match=words):
        hub.require_hub("not/there", "model.path")
