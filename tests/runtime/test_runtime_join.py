"""Nodes that join a run while it goes on (`asyncrl join`), leave it, and die."""

from __future__ import annotations

import gc
import re
import signal
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from ports import reserved_port
from runtime_helpers import (
    DRY,
    HOOKS,
    MODEL,
    PROGRAM,
    REWARDS,
    Process,
    check_trained_once,
    config_of,
    metrics_of,
    write_yaml,
)
from test_runtime_lost import DIES, TELEMETRY

from asyncrl import Runtime
from asyncrl.distributed.joining import ask_to_join
from asyncrl.distributed.line import LineServer
from asyncrl.errors import StallError
from asyncrl.main import main

SECRET = {"ASYNCRL_SECRET": "the secret of these tests", "WARM_WORKERS": ""}
BEGINS = "this node generates from now on"


class JoinedRun:
    """A run of one rank, and nodes that join it. Groups of step 10 and later are played once `go` is called."""

    def __init__(self, folder: Path, stack: ExitStack, tree: dict[str, Any]) -> None:
        self.folder, self._stack, self._go = folder, stack, folder / "go"
        port = stack.enter_context(reserved_port())
        self.address = f"127.0.0.1:{port}"
        distributed = {"listen": self.address, **tree.get("distributed", {})}
        tree = tree | {"distributed": distributed, "hooks": f"{HOOKS}:waiting"}
        arguments = str(write_yaml(folder, tree)), f"run.dir={folder}/runs"
        self.first = self._start("first", *arguments, program=PROGRAM)
        self.first.wait_until(lambda: "nodes may join this run" in self.first.output, "the first lines")

    def _start(self, name: str, *arguments: str, **options: Any) -> Process:
        (place := self.folder / name).mkdir()
        process = Process(place, *arguments, GATE=str(self._go), GATE_FROM="40", **{**SECRET, **options})
        self._stack.callback(process.kill)
        return process

    def join(self, name: str, fault: str = "", *overrides: str, **environ: str) -> Process:
        """`fault`: "MOMENT SIGNAL" of `runtime_dies.py`."""
        program = (str(DIES), *fault.split(), "join") if fault else ("-m", "asyncrl.cli.app", "join")
        return self._start(name, self.address, *overrides, program=program, **environ)

    def go(self) -> None:
        self._go.touch()


def test_nodes_join_leave_and_die_while_a_run_of_one_rank_goes_on(tmp_path: Path) -> None:
    tree = DRY | {
        "train": DRY["train"] | {"max_steps": 60},
        "dry_run": {"decode_step_s": 0.002, "finish_s": 0.01},
        "reward": f"{REWARDS}:short",
        "data": {"max_prompt_tokens": 64, "eval": f"{MODEL}:rows"},
        "evaluate": {"every": 20, "samples": 2, "limit": 6},
        "watchdog": {"loop_timeout_s": 8.0},
        "telemetry": TELEMETRY,
    }
    with ExitStack() as stack:
        run = JoinedRun(tmp_path, stack, tree)
        faults = {"stays": "", "killed": "generates SIGKILL", "sends": "sends SIGKILL", "leaves": "generates SIGTERM"}
        nodes = {name: run.join(name, fault) for name, fault in faults.items()}
        refused = {
            "setting": run.join("setting", "", "train.lr=1"),
            "missing": run.join("missing", "", "data.eval=nowhere.jsonl"),
            "stranger": run.join("stranger", ASYNCRL_SECRET="another secret of these tests"),
        }
        for name, node in nodes.items():
            node.wait_until(lambda node=node: BEGINS in node.output, f"{name} to generate")
        run.go()
        codes = {name: node.wait(120) for name, node in nodes.items()}
        expected = {"stays": 0, "killed": -signal.SIGKILL, "sends": -signal.SIGKILL, "leaves": 128 + signal.SIGTERM}
        outputs = {name: node.output[-3000:] for name, node in nodes.items() if codes[name] != expected[name]}
        assert (run.first.wait(120), codes) == (0, expected), "\n".join([*outputs.values(), run.first.output[-5000:]])
        # When the last steps are played, a prompt of a lost node may come back too late.
        check_trained_once(tmp_path / "runs/run", 60, 20)
        assert "240 trained" in run.first.output
        lines = metrics_of(tmp_path / "runs/run")
        # Each node trained groups, and each evaluation is complete.
        numbers = sorted(int(rank) for rank in re.findall(r"rank (\d+) joins: process", run.first.output))
        assert numbers == [1, 2, 3, 4, 5]
        played = {rank: sum(line.get(f"travel/rank_{rank}/groups", 0) for line in lines) for rank in numbers}
        assert sum(count > 0 for count in played.values()) >= 3, played
        assert [line["step"] for line in lines if "eval/single_turn/avg@2" in line] == [0, 20, 40, 60]
        assert "was stopped by SIGTERM. Other ranks play its" in run.first.output
        assert "done: the run has ended at version 60" in nodes["stays"].output
        # Nodes that are refused say why, and cost the run nothing.
        assert {name: node.wait(60) for name, node in refused.items()} == {"setting": 2, "missing": 2, "stranger": 12}
        assert "a node that joins cannot set train.lr, only " in refused["setting"].output
        assert "nowhere.jsonl" in refused["missing"].output
        assert "or has another ASYNCRL_SECRET" in refused["stranger"].output
        assert "which does not know the secret of this run" in run.first.output


def test_a_node_that_starts_when_the_run_ends_ends_well(tmp_path: Path) -> None:
    tree = DRY | {"reward": f"{REWARDS}:short", "watchdog": {"interval_s": 0.1}, "telemetry": TELEMETRY}
    with ExitStack() as stack:
        run = JoinedRun(tmp_path, stack, tree | {"train": DRY["train"] | {"max_steps": 12}})
        node = run.join("node", "reads SIGTERM")
        node.wait_until((tmp_path / "node/began").exists, "the node to start")
        run.go()
        assert run.first.wait(60) == 0, run.first.output
        (tmp_path / "node/go").touch()
        assert node.wait(60) == 0, node.output
        assert node.output.splitlines()[-1] == "asyncrl: the run has ended before this node generated", node.output
        # No stacks of threads.
        assert len(node.output.splitlines()) < 10, node.output


async def test_rank_0_forgets_the_names_of_nodes_that_have_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_SECRET", SECRET["ASYNCRL_SECRET"])
    tree = DRY | {"reward": f"{REWARDS}:short", "distributed": {"listen": "127.0.0.1:0"}}
    async with Runtime(config_of(tmp_path, base=tree)) as runtime:
        server = runtime.built.line
        assert isinstance(server, LineServer)
        numbers = [(await ask_to_join(server.address, SECRET["ASYNCRL_SECRET"])).rank for _ in range(3)]
        assert numbers == [1, 2, 3]
        with anyio.fail_after(30):
            while server.peers:  # noqa: ASYNC110  # of the other end's thread
                await anyio.sleep(0.01)
        assert (server.machines, server._left) == ({}, set())
        await runtime.run()


def test_a_run_whose_ranks_only_train_ends_if_no_node_joins(tmp_path: Path) -> None:
    tree = DRY | {
        "reward": {"functions": [f"{REWARDS}:short"], "timeout_s": 1.0},
        "watchdog": {"stall_timeout_s": 3.0, "interval_s": 0.5},
        "telemetry": TELEMETRY,
        "data": {"max_prompt_tokens": 64, "eval": f"{MODEL}:rows"},
        "evaluate": {"every": 1, "samples": 1, "limit": 2},
        "distributed": {"roles": {"train": 1, "generate": 0}},
    }
    with ExitStack() as stack:
        first = JoinedRun(tmp_path, stack, tree).first
        assert first.wait(60) == StallError.exit_code, first.output
        shown = " ".join(first.output.split())
        assert "rank 0 only trains (distributed.roles: train rank 0, generate no rank; distributed.listen: " in shown
        assert "no rank generates: the run waits for a node to join. It ends if nothing is generated within" in shown
        assert "no rank generates, and no node has joined for 3." in shown, shown


def test_a_run_that_cannot_let_nodes_join_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for secret, address, words in (
        (None, "127.0.0.1:0", "distributed.listen is set, so nodes"),
        ("short", "127.0.0.1:0", "ASYNCRL_SECRET has 5 characters"),
        ("long enough for a run", "here", "distributed.listen is 'here'; expected HOST:PORT"),
        ("long enough for a run", "here:" + "1" * 5000, "expected HOST:PORT"),
    ):
        monkeypatch.setenv("ASYNCRL_SECRET", secret) if secret else monkeypatch.delenv("ASYNCRL_SECRET", raising=False)
        tree = DRY | {"reward": f"{REWARDS}:short", "distributed": {"listen": address}}
        assert main([str(write_yaml(tmp_path, tree)), f"run.dir={tmp_path}/runs"]) == 2
        assert words in capsys.readouterr().err


async def test_a_run_that_nodes_may_join_and_that_never_runs_leaves_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_SECRET", "the secret of a test")
    config = config_of(tmp_path, "distributed.listen=127.0.0.1:0", base=DRY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        async with Runtime(
            config, rewards=lambda completions, **_: [0.0] * len(completions), prompts=[{"prompt": "a"}], write=False
        ):
            pass
        gc.collect()
    assert not [each.message for each in caught if "MemoryObject" in str(each.message)]
