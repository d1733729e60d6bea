"""Every code block of README.md, CONTRIBUTING.md and docs/: played as a reader would, or parsed where something is missing."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pages import NEEDS, PAGES, ROOT, Block, blocks
from warm import Popen

from asyncrl import Runtime, Trajectory
from asyncrl.config.fields import config_fields
from asyncrl.config.load import load_config
from asyncrl.telemetry.sinks import read_jsonl

TIMEOUT_S = 500
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Settings in the place of what is downloaded, and of the hours that a real run takes
TINY = [
    "model.path=quickstart_model.py:build",
    "train.max_steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=8",
    "telemetry.live=plain",
]
# Programs without arguments of ours ("": the shell's own `.`)
SYSTEM = {"", "git", "cd", "mkdocs", "pre-commit", "pytest", "numactl"}


def plain(language: str) -> list[Block]:
    """Blocks that nothing is said of."""
    return [block for block in blocks() if block.language == language and not block.needs and not block.test]


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block as lists of words, without variables in front."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command, words = words[:end], words[end + 1 :]
            while command and re.fullmatch(r"[A-Z_0-9]+=.*", command[0]):
                del command[0]
            yield command


def settings_of(command: list[str]) -> list[str] | None:
    """The arguments of a command that starts a run: files and overrides."""
    for start in (["asyncrl", "run"], ["asyncrl.main"]):
        for place in range(len(command)):
            if command[place : place + len(start)] == start:
                return command[place + len(start) :]
    return None


def test_every_mark_is_known_and_every_name_is_played() -> None:
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for block in blocks():
        assert not block.needs or {*block.needs.split(", ")} <= {*NEEDS}, block
        assert not block.test or any(f'blocks("{block.test}")' in text for text in tests), block
        assert block.language in ("", "bash", "python", "yaml"), block
        if not block.language:
            assert not re.search(r"^(asyncrl|python|import|from)\b", block.text, re.MULTILINE), block


def test_what_is_not_played_is_parsed() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block


def test_files_and_settings_that_pages_name_exist() -> None:
    """In backticks: `models/rotary.py` is the end of a path, `train.lr` a setting, `reward.text` a section."""
    folders = [ROOT / name for name in ("asyncrl", "client", "docs", "examples", "tests", "tools", ".github")]
    files = {f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")}
    names = {part for name in config_fields() for part in (name, name.rpartition(".")[0])}
    starts = {name.partition(".")[0] for name in names}
    for page in PAGES:
        for word in re.findall(r"`([\w./-]+)`", page.read_text()):
            if re.fullmatch(r"(?!runs/|state/|profile/)[\w-]+(/[\w-]+)+\.(py|c|cpp|h|md|yaml|json|png)", word):
                assert any(file.endswith(f"/{word}") for file in files), f"{page.name}: there is no {word}"
            elif re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", word) and word.partition(".")[0] in starts - {"run"}:
                known = word in names or word.endswith((".py", ".yaml", ".jsonl", ".json"))
                assert known, f"{page.name}: there is no setting {word}"


def test_pages_install_what_the_project_has() -> None:
    """Extras by their names, packages by the versions that the project asks for."""
    for block in blocks():
        for command in commands(block) if block.language == "bash" else ():
            if Path(command[0]).name != "pip":
                continue
            for word in command:
                extra = re.fullmatch(r"\.\[(.*)\]", word)
                if extra:
                    assert {*extra[1].split(",")} <= {*PROJECT["optional-dependencies"]}, block
                if word.startswith("./"):
                    assert (ROOT / word / "pyproject.toml").exists(), block


def test_every_command_has_a_program_and_arguments_that_it_takes(desk: Desk) -> None:
    """Programs of this repository parse their arguments. What starts a run has tests below."""
    wanted: dict[str, str] = {}
    for block in blocks():
        for command in commands(block) if block.language == "bash" else ():
            name = Path(command[0]).name
            if settings_of(command) is not None or name in SYSTEM:
                continue
            if name == "asyncrl":
                wanted[shlex.join(command)] = str(block)
            elif name == "python" and command[1].endswith(".py"):
                text = (ROOT / command[1]).read_text()
                if "parse_args(" in text:
                    wanted[shlex.join(command[1:])] = str(block)
                else:
                    assert command[1].startswith("examples/") or not command[2:], block
            elif name == "bash":
                assert (ROOT / command[1]).exists(), block
            else:
                assert name in ("pip", "python3", "nsys", "python"), f"{block}: {command}"
    (desk.folder / "wanted.json").write_text(json.dumps(wanted))
    shutil.copy(Path(__file__).with_name("parse_commands.py"), desk.folder)
    desk.finish(desk.terminal("python parse_commands.py wanted.json"))


def test_what_starts_a_run_names_files_and_settings_that_load(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.folder)
    (desk.folder / "x.yaml").write_text("model: {path: x}\ndata: {max_prompt_tokens: 8}\n")
    for block in blocks():
        for command in commands(block) if block.language == "bash" else ():
            settings = settings_of(command)
            words = [word for word in settings or () if word not in ("--dry-run", "--help")]
            if "--assume-devices" in words:
                words = words[: words.index("--assume-devices")]
            if words and not words[0].startswith(("mine", "base")):
                files = [word for word in words if word.endswith(".yaml")]
                load_config(files, words[len(files) :])


@pytest.mark.parametrize(
    "words", sorted({tuple(w) for b in plain("bash") for c in commands(b) if (w := settings_of(c))}), ids=" ".join
)
def test_a_run_that_a_page_starts_passes_its_dry_run(desk: Desk, words: tuple[str, ...]) -> None:
    if "--help" not in words:
        words = (*(word for word in words if word != "--dry-run"), "--dry-run")
    desk.finish(desk.terminal(shlex.join(["asyncrl", "run", *words])))


COMMANDS = {"python": [sys.executable], "asyncrl": [sys.executable, "-m", "asyncrl.cli.app"]}


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
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

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


@pytest.mark.parametrize("block", plain("python"), ids=str)
def test_a_program_runs(desk: Desk, block: Block) -> None:
    program = desk.program(block.text)
    if "RecordRing" in block.text:
        producer = desk.terminal("python examples/external_producer.py")
        assert "the run is over at version 20" in desk.finish(producer)
    last = desk.finish(program).splitlines()[-1]
    assert re.match(r"(version )?\d+\b", last), last
    assert not (desk.folder / "runs").exists()


def test_rows_a_reward_and_five_lines_are_a_run(desk: Desk) -> None:
    reward, settings, *others = blocks("own data")
    assert reward.page.name == "README.md" and others
    (desk.folder / "rewards.py").write_text(reward.text)
    (desk.folder / "x.yaml").write_text(settings.text)
    (desk.folder / "train.jsonl").write_text(
        '{"prompt": "a3=", "answer": "aaa"}\n{"prompt": "b2=", "answer": "bb"}\n' * 8
    )
    shutil.copy(ROOT / "examples" / "quickstart_model.py", desk.folder)
    output = desk.finish(desk.terminal(shlex.join(["asyncrl", "run", "x.yaml", *TINY])))
    assert "done: version 2" in output and (desk.folder / "runs").exists()
    for block in others:
        (desk.folder / "x.yaml").write_text(block.text)
        assert str(load_config([desk.folder / "x.yaml"]).data.train).endswith("train.jsonl")


def test_every_line_of_doors_is_a_configuration(desk: Desk) -> None:
    [block] = blocks("doors")
    base = desk.folder / "examples" / "agent_loop.yaml"
    for number, line in enumerate(block.text.splitlines()):
        path = desk.folder / f"{number}.yaml"
        path.write_text(line)
        assert load_config([base, path]).door.ring == "my-run"


@pytest.mark.parametrize("block", [*plain("yaml"), *blocks("reward model")], ids=str)
def test_a_part_of_a_file_is_a_configuration(desk: Desk, block: Block) -> None:
    (desk.folder / "part.yaml").write_text(block.text)
    assert load_config([desk.folder / "examples" / "agent_loop.yaml", desk.folder / "part.yaml"])


def test_a_loss_an_advantage_and_an_environment_of_ones_own_train(desk: Desk) -> None:
    loss, setting, rest = blocks("own methods")
    (desk.folder / "examples" / "my.py").write_text(f"{loss.text}\n\n{rest.text}")
    (desk.folder / "examples" / "my.yaml").write_text(setting.text)
    words = ["examples/quickstart.yaml", "examples/my.yaml", "train.max_steps=2", "algorithm.clip.epsilon_high=null"]
    desk.finish(desk.terminal(shlex.join(["asyncrl", "run", *words])))
    assert [line["step"] for line in read_jsonl(desk.folder / "runs" / "quickstart" / "metrics.jsonl")] == [1, 2]


def test_two_terminals_and_another_producer_make_a_run(desk: Desk) -> None:
    [block] = blocks("producer and run")
    run, producer = block.text.splitlines()
    other = 'import sys; sys.path.insert(0, "examples"); import external_producer as e; e.main("external", 1, 300.0)'
    started = [desk.terminal(f"{run} train.max_steps=4"), desk.terminal(producer), desk.program(other)]
    text, *producers = (desk.finish(process) for process in started)
    assert "done: version 4" in text and "refused" not in text
    assert all("the run is over at version 4" in each for each in producers)
    lines = read_jsonl(desk.folder / "runs" / "external" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["staleness/max"] <= 2 and 0.3 < line["reward/mean"] < 1 for line in lines)


def test_a_producer_pushes_into_a_run(desk: Desk) -> None:
    [block] = blocks("producer")
    run = desk.terminal("asyncrl run examples/external_run.yaml train.max_steps=2")
    assert "pushed" in desk.finish(desk.program(block.text))
    assert "done: version 2" in desk.finish(run)


@pytest.mark.slow
def test_the_nightly_sweep_runs_as_the_page_starts_it(desk: Desk) -> None:
    [block] = (block for block in blocks() if "tools/model_sweep.py" in block.text and block.needs == "hours")
    [sweep] = (command for command in commands(block) if "tools/model_sweep.py" in command)
    assert "0 WRONG" in desk.finish(desk.terminal(shlex.join([*sweep, "--types", "llama", "--out", "models.md"])))


SMALL = """
import calculator

calculator.BATCHES = 2
build = calculator.build
"""


def test_the_agent_of_the_readme_is_a_run(desk: Desk) -> None:
    agent, settings = blocks("own agent")
    assert agent.page.name == "README.md" and len([line for line in agent.text.splitlines() if line.strip()]) <= 15
    (desk.folder / "agent.py").write_text(agent.text)
    (desk.folder / "x.yaml").write_text(settings.text)
    (desk.folder / "train.jsonl").write_text('{"prompt": "32*45", "answer": "1440"}\n' * 8)
    (desk.folder / "small.py").write_text(SMALL)
    for name in ("calculator.py", "agents_model.py"):
        shutil.copy(ROOT / "examples" / name, desk.folder)
    words = ["model.path=small.py:build", "data.max_prompt_tokens=20", "rollout.max_context=100", *TINY[1:]]
    assert "done: version 2" in desk.finish(desk.terminal(shlex.join(["asyncrl", "run", "x.yaml", *words])))
    [settings] = blocks("agents settings")
    assert settings.text.count("agent.py:episode") == 1


@pytest.mark.parametrize("block", blocks("agents"), ids=str)
async def test_each_agent_of_the_page_is_played_and_trained(
    block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "small.py").write_text(SMALL)
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    words = [f"model.path={tmp_path}/small.py:build", "rollout.groups_per_step=1", "rollout.max_context=120"]
    async with Runtime(load_config([ROOT / "examples" / "agent_loop.yaml"], words), write=False) as runtime:
        group = await runtime.play(names["episode"], {"prompt": "32*45", "answer": "1440"}, n=3)
        assert len(group) == 3 and (await runtime.finish()).books.trained == 1


def test_the_program_of_the_page_plays_an_agent_of_a_file(desk: Desk) -> None:
    [program], agents = blocks("agents program"), blocks("agents")
    (desk.folder / "agent.py").write_text(agents[1].text)
    (desk.folder / "small.py").write_text(SMALL)
    for name in ("calculator.py", "agents_model.py"):
        shutil.copy(ROOT / "examples" / name, desk.folder)
    text = program.text.replace('calculator.yaml"]', 'calculator.yaml"], ["model.path=small.py:build"]')
    assert "version 2" in desk.finish(desk.program(text))


def test_the_tool_loop_trains_what_the_policy_sampled_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import tool_loop

    played: list[Trajectory] = []

    class Watched(Runtime):
        async def play(self, *arguments: Any, **options: Any) -> list[Trajectory]:
            group = await super().play(*arguments, **options)
            for each in group:
                text = self.tokenizer.decode(each.tokens)
                heard = re.sub(r"\\s", "", self.tokenizer.decode(each.tokens[~each.mask]))
                assert re.fullmatch(r"([abcd][1-9]=)+", heard) and text.startswith(heard[:3])
                assert each.turns is not None or heard == text[:3]
            played.extend(group)
            return group

    monkeypatch.setattr(tool_loop, "Runtime", Watched)
    rewards = asyncio.run(tool_loop.main(steps=3))
    assert len(rewards) == capsys.readouterr().out.count("version ") == 3
    assert len(played) == 3 * 8 * 8
    for each in played:
        assert each.branches is None and each.tokens.size == each.mask.size == each.versions.size
        assert (each.versions[each.mask] >= 0).all() and (each.versions[~each.mask] == -1).all()
        assert (each.logprobs[~each.mask] == 0).all() and (each.logprobs[each.mask] < 0).mean() > 0.9
    assert sum(each.turns is not None for each in played) > len(played) / 4
