"""Checkpoints that rotted on disk: nothing of them is used, the file is named, and so is the way to go on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from runtime_helpers import MODEL, REAL, metrics_of, write_yaml

from asyncrl.cli.app import main as command_line
from asyncrl.main import main

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from attack_checkpoint import Outcome, attack

TREE: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": {"path": f"{MODEL}:build", "dtype": "float32", "lora": {"rank": 2}},
    "algorithm": {"kl": {"coef": 0.1}},  # the reference is part of the state
    "checkpoint": {"every": 1, "keep": 0},
    "telemetry": {"live": "plain", "trace": False, "report": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main([str(write_yaml(folder, TREE)), f"run.dir={folder}/my runs"]) == 0
    return folder


@pytest.fixture
def three(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of three steps, in a run directory whose path a shell would cut."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "my runs", "my runs", symlinks=True)
    write_yaml(tmp_path, TREE | {"run": {"dir": "my runs"}})
    return tmp_path / "my runs/run/checkpoints"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_no_damaged_file_loads_and_each_is_named(three: Path) -> None:
    found = attack(three / "step_3", flips=8)
    assert {"adapter/adapter_model.safetensors", "config.json", "model.safetensors", "tokenizer.json"} <= found.keys()
    assert {"state/manifest.json", "state/run.json", "state/trainer.pt"} <= found.keys()
    assert found == dict.fromkeys(found, Outcome(places=10))


def test_a_damaged_checkpoint_ends_a_resume_and_the_way_out_works(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three are damaged: the oldest one is offered, by a command that does what it says."""
    flip(three / "step_3/state/trainer.pt")
    flip(three / "step_2/state/run.json")
    more = ["run.yaml", "resume=true", "train.max_steps=4"]
    assert main(more) == 5
    said = capsys.readouterr().err
    assert "step_3 is damaged: state/trainer.pt is not what was written (its SHA-256 differs)" in said
    [command] = re.findall(r"step_1 is whole: `(.*)`, and resume=true goes on from there", said)
    assert main(more) == 5  # nothing is fallen back to by itself
    assert [line["step"] for line in metrics_of(three.parent)] == [1, 2, 3]
    subprocess.run(command, shell=True, check=True)
    capsys.readouterr()
    assert main(more) == 0
    assert [line["step"] for line in metrics_of(three.parent)] == [1, 2, 3, 4]
    assert command_line(["check", str(three.parent)]) == 0  # the damaged ones were written again
    assert "checksums" not in capsys.readouterr().out


def test_without_an_earlier_one_that_is_whole_this_is_said(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2, 3):
        flip(three / f"step_{version}/config.json")
    assert main(["run.yaml", "resume=true"]) == 5
    assert "no earlier one here is whole; run.overwrite=true starts anew" in capsys.readouterr().err


def test_a_checkpoint_of_before_is_resumed_with_a_word(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest has sizes alone, which are still compared."""
    state = three / "step_3/state"
    files = [path for path in state.parent.rglob("*") if path.is_file() and path.name != "manifest.json"]
    sizes = {path.relative_to(state.parent).as_posix(): path.stat().st_size for path in files}
    (state / "manifest.json").write_bytes(orjson.dumps(sizes, option=orjson.OPT_INDENT_2))
    assert main(["run.yaml", "resume=true", "train.max_steps=4"]) == 0
    said = capsys.readouterr().out
    assert said.count("step_3 was written without checksums: damage in it would not be noticed") == 1
    (three / "latest").unlink()
    (three / "latest").symlink_to("step_3")
    (three / "step_3/model.safetensors").write_bytes(b"short")
    assert main(["run.yaml", "resume=true", "train.max_steps=5"]) == 5
    assert "model.safetensors has 5 bytes; expected" in capsys.readouterr().err


def test_a_run_that_starts_from_a_damaged_checkpoint_is_refused(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a model, its tokenizer, or a judge. What lies in `state/` is not read then, and does not matter."""
    plain = ["run.yaml", "run.dir=other", "model.lora.rank=0", "train.max_steps=1", "run.overwrite=true"]
    start = f"model.path={three / 'latest'}"
    flip(three / "step_3/state/trainer.pt")
    assert main([*plain, start]) == 0
    flip(three / "step_3/model.safetensors")
    capsys.readouterr()
    for settings in (
        [start],
        [start, "--dry-run"],
        [f"model.tokenizer={three / 'step_3'}", f"model.path={three / 'step_2'}"],
    ):
        assert main([*plain, *settings]) == 5
        said = capsys.readouterr().err
        assert f"{settings[0].partition('=')[0]}: the checkpoint {three}" in said
        assert "is damaged: model.safetensors is not what was written" in said
        assert f"asyncrl check '{three}'" in said
    assert command_line(["check-model", str(three / "latest")]) == 2
    assert "model.safetensors is not what was written" in capsys.readouterr().err
    (three / "step_3/state/manifest.json").unlink()  # somebody who changed it on purpose
    flip(three / "step_3/model.safetensors")
    assert main([*plain, start]) == 0
