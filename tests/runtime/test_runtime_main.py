"""The command line: exit codes, help, dry run, and that all doors lead to the same run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_helpers import DRY, HOOKS, MODEL, REAL, REWARDS, Process, metrics_of, start, unclocked, write_yaml

from asyncrl.cli.app import main as console
from asyncrl.errors import GenerationError, StallError
from asyncrl.main import main, split_arguments


def test_help_names_every_setting_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert console(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("rollout.max_staleness", "train.lr", "watchdog.abort_grace_s", "preset=one_off"):
        assert name in text
    assert console(["--help"]) == 0
    assert "asyncrl run CONFIG.yaml" in capsys.readouterr().out


def test_what_is_not_known_exits_2_with_the_nearest_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_yaml(here, DRY))
    for program, arguments, *words in (
        (console, ["train"], "'train'"),
        (console, ["run"], "no configuration"),
        (main, [file, "train.max_stepz=2"], "train.max_steps"),
        (main, [file, "preset=asink"], "async"),
        (main, [str(here / "missing.yaml")], "missing.yaml"),
        (main, [file, "train.lr", "3"], "train.lr does not exist", "to set it write train.lr=VALUE"),
        *(
            (main, [file, option], f"there is no option '{option}'; did you mean --dry-run?")
            for option in ("--dryrun", "--dry_run", "dry-run")
        ),
    ):
        assert program(arguments) == 2
        said = capsys.readouterr().err
        assert all(each in said for each in words), said


def test_files_compose_left_to_right_then_overrides(here: Path) -> None:
    base = str(write_yaml(here, DRY))
    more = str(write_yaml(here, {"rollout": {"groups_per_step": 2}, "train": {"max_steps": 5}}, "more.yaml"))
    assert main([base, more, "--train.max-steps", "2", "run.name=composed"]) == 0
    resolved = yaml.safe_load((here / "runs/composed/config.yaml").read_text())
    assert (resolved["rollout"]["groups_per_step"], resolved["train"]["max_steps"]) == (2, 2)
    assert resolved["rollout"]["max_staleness"] == 2  # as resolved: the preset's value is filled in
    assert [line["step"] for line in metrics_of(here / "runs/composed")] == [1, 2]


def test_arguments_are_files_until_the_first_override() -> None:
    assert split_arguments(["a.yaml", "b.yaml", "x.y=1", "c.yaml"]) == (["a.yaml", "b.yaml"], ["x.y=1", "c.yaml"])


def test_dry_run_prints_the_plan_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_yaml(here, REAL)), "--dry-run", "preset=one_off"]) == 0
    text = capsys.readouterr().out
    assert "slots: 8 groups (32 sequences)" in text
    assert "at most 1 policy versions old" in text
    assert "  cache " in text and "total" in text and "GiB" in text
    plan = yaml.safe_load(text.split("\nslots:")[0])
    assert plan["rollout"]["max_staleness"] == 1 and plan["engine"]["max_sequences"] == 32
    assert not (here / "runs").exists()
    assert main([str(here / "run.yaml"), "train.max_steps=1"]) == 0  # a plan does not stand in the way of the run


def test_a_run_directory_is_not_overwritten_by_accident(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_yaml(here, DRY))
    assert main([file]) == 0
    assert main([file]) == 2
    assert "run.overwrite=true" in capsys.readouterr().err
    assert main([file, "run.overwrite=true", "train.max_steps=1"]) == 0
    assert len(metrics_of(here / "runs/run")) == 1
    [aside] = [path for path in (here / "runs").iterdir() if path.name != "run"]
    assert len(metrics_of(aside)) == 3


def test_reward_error_exits_6_and_names_the_function(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_yaml(here, DRY | {"reward": f"{REWARDS}:broken"}))]) == 6
    error = capsys.readouterr().err
    assert "RewardError" in error and "'broken'" in error and "no such column" in error


@pytest.mark.parametrize(("function", "kind"), [("slow", "RewardTimeout"), ("crash", "RewardCrash")])
def test_a_reward_that_sleeps_or_dies_exits_6_and_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], function: str, kind: str
) -> None:
    # One that dies gets all the time that it needs to begin.
    reward = {"functions": [f"{REWARDS}:{function}"]} | ({"timeout_s": 0.3} if function == "slow" else {})
    assert main([str(write_yaml(here, DRY | {"reward": reward}))]) == 6
    error = capsys.readouterr().err
    assert kind in error and f"'{function}'" in error


def test_divergence_exits_3(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_yaml(here, REAL | {"preset": "sync", "algorithm": {"mismatch_gate": 1e-30}})
    assert main([str(file)]) == 3
    error = capsys.readouterr().err
    assert "DivergenceError" in error and "the step after version 0 is not applied" in error
    assert metrics_of(here / "runs/run") == []
    assert [path.name for path in (here / "runs/run/checkpoints").glob("step_*")] in ([], ["step_0"])


def played(environment: str, **watchdog: float) -> dict[str, Any]:
    return DRY | {"rollout": DRY["rollout"] | {"environment": f"{MODEL}:{environment}"}, "watchdog": watchdog}


STALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "environment that never returns": (
        played("Hanging", stall_timeout_s=3.0),
        ["of group 4 waits for its episode from the environment for", "runtime_model.py", " run"],
    ),
    "environment that stands still behind its last token": (
        played("Pondering", stall_timeout_s=3.0),
        ["nothing was generated", " waits for its episode from the environment for", "runtime_model.py", " a_tool"],
    ),
    "evaluation before the first step": (
        played("Thinking", stall_timeout_s=3.0)
        | {"data": DRY["data"] | {"eval": f"{MODEL}:held_out"}, "evaluate": {"every": 10}},
        ["nothing was generated", "of group -1 waits for its episode from the environment", "runtime_model.py"],
    ),
    "rollouts that take no cancellation for an answer": (
        played("Stubborn", stage_timeout_s=4.0) | {"hooks": f"{HOOKS}:failing"},
        [
            "a task that was cancelled when the training ended (HookError: hook after_advantages",
            "has not ended for",
            "of group 4 waits for its episode from the environment",
            "runtime_model.py",
        ],
    ),
    "environment that samples for ever": (
        DRY | {"rollout": DRY["rollout"] | {"environment": f"{MODEL}:Endless", "timeout_s": 2.0}},
        ["GenerationError: the episode of member", "did not end within rollout.timeout_s = 2 s: it asked the engine"],
    ),
    "data that never comes": (
        DRY | {"data": DRY["data"] | {"train": f"{MODEL}:rows_never"}, "watchdog": {"stage_timeout_s": 4.0}},
        ["the run stands still at 'checking the device, the settings and the files", "rows_never"],
    ),
    "model that never comes": (
        REAL | {"model": {"path": f"{MODEL}:build_hanging", "dtype": "float32"}, "watchdog": {"stage_timeout_s": 4.0}},
        ["the run stands still at 'measuring prompts and memory'", "build_hanging"],
    ),
    "report that is never written": (
        DRY | {"reward": f"{REWARDS}:pipe_in_place_of_the_report", "watchdog": {"stage_timeout_s": 4.0}},
        ["the run stands still at 'writing the trace and the report' for", "report.py"],
    ),
    "environment that blocks the loop": (
        played("Wedging", loop_timeout_s=3.0),
        ["event loop has been silent", "block_the_loop"],
    ),
    "closure that holds the lane": (
        REAL | {"model": {"path": f"{MODEL}:build_wedged", "dtype": "float32"}, "watchdog": {"lane_timeout_s": 3.0}},
        ["has been held by closure", "runtime_model.py"],
    ),
}


# Other causes than those of each push, which the watchdog finds in the same way.
NIGHTLY = [what for what in STALLS if any(word in what for word in ("last token", "first step", "model"))]
PUSHED = [what for what in STALLS if what not in NIGHTLY]


@pytest.mark.parametrize(
    "causes", [PUSHED[::2], PUSHED[1::2], pytest.param(NIGHTLY, marks=pytest.mark.slow)], ids=["some", "others", "more"]
)
def test_stalled_runs_name_the_culprit_and_exit_4(tmp_path: Path, causes: list[str]) -> None:
    """Several runs beside each other, because a run waits for the limit of its watchdog."""
    runs: dict[str, Process] = {}
    try:
        for number, cause in enumerate(causes):
            tree = STALLS[cause][0]
            tree = tree | {"watchdog": {"interval_s": 0.2, "abort_grace_s": 1.0} | tree.get("watchdog", {})}
            runs[cause] = start(tmp_path / str(number), tree)
        for cause, run in runs.items():
            expected = GenerationError.exit_code if "samples" in cause else StallError.exit_code
            assert run.wait(60) == expected, run.output
            said = [line for line in run.output.splitlines() if line.startswith("=== asyncrl watchdog: ")][:1]
            for word in STALLS[cause][1]:
                assert word in (run.output if "samples" in cause else said[0]), run.output
    finally:
        for run in runs.values():
            run.kill()


def test_all_doors_give_the_same_run(here: Path) -> None:
    """`asyncrl run`, `python -m asyncrl.main` and a one-rank torchrun: the same metrics for preset sync."""
    file = str(write_yaml(here, REAL | {"preset": "sync"}))
    assert console(["run", file, "run.name=console"]) == 0
    module = Process(here, file, "run.name=module", start=subprocess.Popen)
    assert module.wait() == 0, module.output
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "asyncrl.main")
    launched = Process(here, file, "run.name=torchrun", program=torchrun)  # from nothing: test_runtime_signals
    assert launched.wait() == 0, launched.output
    lines = [unclocked(metrics_of(here / "runs" / name)) for name in ("console", "module", "torchrun")]
    assert len(lines[0]) == 3
    assert lines[0] == lines[1] == lines[2]
    assert "report.html" in module.output and "latest" in module.output
    assert "Writing model shards" not in module.output


LEAVES = """
import asyncio, sys
from asyncrl import Hooks
from asyncrl.environments.single_turn import SingleTurn

async def tool():
    {leave}

class Tools(SingleTurn):
    async def run(self, prompt, member, group_size, generate):
        if prompt.group_id == 2:
            await asyncio.gather(tool(), asyncio.sleep(0))
        return await super().run(prompt, member, group_size, generate)

def leave(*_):
    {leave}

before = Hooks(before_group=leave)
after = Hooks(after_advantages=leave)
"""


EXIT, INTERRUPT, CANCEL = "sys.exit(0)", "raise KeyboardInterrupt", "raise asyncio.CancelledError"


@pytest.mark.parametrize(
    ("setting", "leaves", "code", "words"),
    [
        # A task of its own leaves, and the loop goes on.
        ("rollout.environment={file}:Tools", (EXIT, INTERRUPT, CANCEL), 0, "1 failed"),
        ("hooks={file}:before", (EXIT, INTERRUPT, CANCEL), 13, "hook before_group (leave)"),
        ("hooks={file}:after", (EXIT, INTERRUPT), 13, "hook after_advantages (leave)"),
        ("rollout.environment={file}:leave", (EXIT, CANCEL), 2, "environment"),
        ("data.train={file}:leave", (INTERRUPT, CANCEL), 2, "data.train"),
    ],
)
def test_user_code_that_leaves_never_ends_a_run_as_if_all_were_well(
    here: Path, capsys: pytest.CaptureFixture[str], setting: str, leaves: tuple[str, ...], code: int, words: str
) -> None:
    """SystemExit, a KeyboardInterrupt that nobody typed, a cancellation that nobody asked for."""
    for number, leave in enumerate(leaves):
        file = here / f"leaves_{number}.py"
        file.write_text(LEAVES.format(leave=leave))
        more = "rollout.max_staleness=0", "run.overwrite=true", setting.format(file=file)
        assert main([str(write_yaml(here, DRY)), *more]) == code
        said = capsys.readouterr()
        assert words in said.out + said.err
    if not code:
        assert [line["step"] for line in metrics_of(here / "runs/run")] == [1, 2, 3]
