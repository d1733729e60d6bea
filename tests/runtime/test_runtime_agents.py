"""Agents in whole runs: named by a configuration, played by a program, evaluated, and whatever one of them may do wrong."""

from __future__ import annotations

import asyncio
import itertools
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from runtime_agents import scored_here
from runtime_helpers import (
    DRY,
    MODEL,
    REAL,
    config_of,
    embedded,
    equal_weights,
    lines_at_least,
    metrics_of,
    reports_of,
    rollouts_of,
    start,
    train,
    unclocked,
    weights_of,
)

from asyncrl import NotebookRuntime, Runtime
from asyncrl.concurrency import isolated
from asyncrl.errors import ConfigError, DataError, GenerationError, LifecycleError
from asyncrl.telemetry.sinks import read_jsonl

AGENTS = Path(__file__).with_name("runtime_agents.py")
ONE_STEP = REAL | {"train": REAL["train"] | {"max_steps": 1}}


class Acts:
    """An environment that makes its own requests."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        raise AssertionError


def of_agents(folder: Path, name: str, *overrides: str, base: dict[str, Any] = REAL) -> Any:
    return config_of(folder, f"rollout.environment={AGENTS}:{name}", "data.max_prompt_tokens=30", *overrides, base=base)


async def test_a_configuration_names_an_agent_which_is_trained_and_evaluated(tmp_path: Path) -> None:
    tree = {key: value for key, value in REAL.items() if key != "reward"}
    config = of_agents(
        tmp_path, "scored_here", f"data.eval={MODEL}:rows", "evaluate.every=3", "evaluate.limit=2", base=tree
    )
    async with Runtime(config) as runtime:
        summary = await runtime.run()
    assert runtime.directory is not None
    lines = read_jsonl(runtime.directory.path / "metrics.jsonl")
    steps = [line for line in lines if "own/letters" in line]
    assert [line["step"] for line in steps] == [1, 2, 3] and summary.books.failed == 0
    assert all(line["own/letters"] > 0 for line in steps)
    assert "eval/scored_here/own/letters/mean" in lines[-1] and "eval/scored_here/avg@1" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_sync_run_of_agents_that_is_ended_resumes_as_if_nothing_had_happened(
    tmp_path: Path, end: signal.Signals
) -> None:
    """Branches, tools that take any time, and the credit of each reply."""
    tree = {key: value for key, value in REAL.items() if key != "reward"}
    tree |= {"preset": "sync", "checkpoint": {"every": 1, "keep": 0}, "algorithm": {"credit": "discounted"}}
    tree["train"] = REAL["train"] | {"max_steps": 24}
    tree["rollout"] = REAL["rollout"] | {"environment": f"{AGENTS}:branching"}
    tree["data"] = REAL["data"] | {"max_prompt_tokens": 30}
    whole, ended = (tmp_path / "runs" / name for name in ("whole", "ended"))
    await train(tmp_path, "run.name=whole", base=tree)
    process = start(tmp_path, tree, "run.name=ended")
    process.wait_until(lines_at_least(ended, 5), "fifth step")
    process.send(end)
    process.wait()
    assert len(metrics_of(ended)) < 24
    assert (await train(tmp_path, "run.name=ended", "resume=true", base=tree)).version == 24
    rows = rollouts_of(ended)
    assert rows == rollouts_of(whole) and len({(row["group_id"], row["member"]) for row in rows}) == len(rows)
    assert equal_weights(weights_of(ended, 24), weights_of(whole, 24))
    # What the engine counts depends on which requests met.
    lines = (unclocked(metrics_of(each)) for each in (ended, whole))
    one, other = ([{k: v for k, v in line.items() if k[:7] != "engine/"} for line in each] for each in lines)
    assert one == other and all("own/letters" in line for line in one)


async def test_a_program_passes_an_agent_or_rewards_for_the_prompts_of_its_configuration(tmp_path: Path) -> None:
    tree = {key: value for key, value in ONE_STEP.items() if key != "reward"}
    turns = "rollout.max_context=60", "rollout.max_turns=2"
    assert (await train(tmp_path, *turns, base=tree, environment=scored_here, write=False)).books.trained == 4
    summary = await train(tmp_path, base=tree, rewards=lambda completions, **_: [1.0] * len(completions), write=False)
    assert summary.books.trained == 4


async def test_reward_functions_score_an_agent_that_returns_none(tmp_path: Path) -> None:
    reports = await reports_of(of_agents(tmp_path, "scored_elsewhere", base=ONE_STEP), write=False)
    assert ["reward/share/mean" in report.metrics for report in reports] == [True]


async def test_an_agent_without_a_reward_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    tree = {key: value for key, value in REAL.items() if key != "reward"}
    config = of_agents(tmp_path, "scored_elsewhere", base=tree)
    words = "the run has no reward functions to score it; return a number, .*runtime_agents.py:.* in scored_elsewhere"
    with pytest.raises(ConfigError, match=words):
        async with Runtime(config, write=False) as runtime:
            await runtime.run()


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("with_a_bare_tool", "look because it has no docstring", "await policy.chat("),
        ("of_a_wrong_type", "the episode returned Reply(", "async def of_a_wrong_type("),
        ("without_a_template", "messages need a chat template, and the tokenizer has none", "await policy.chat([{"),
    ],
)
async def test_a_mistake_ends_the_run_at_its_first_episode_and_names_the_line(
    tmp_path: Path, name: str, words: str, line: str
) -> None:
    number = next(n for n, text in enumerate(AGENTS.read_text().splitlines(), 1) if line in text)
    with pytest.raises(ConfigError) as raised:
        async with Runtime(of_agents(tmp_path, name), write=False) as runtime:
            await runtime.run()
    assert words in str(raised.value) and str(raised.value).endswith(f" ({AGENTS}:{number} in {name})")
    assert runtime.summary().books.failed == 0 and "rollout/retries" not in runtime.recorder.drain()


async def test_a_mistake_in_a_played_episode_is_raised_by_play(tmp_path: Path) -> None:
    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a", temperatur=0.5)
        return 1.0

    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        with pytest.raises(ConfigError, match=r"'temperatur' is unknown; .* in episode\)$"):
            await runtime.play(episode, "a3=")
        assert runtime.summary().books.live == 0
        assert len(await runtime.play(two_turns, "a3=")) == 4
        await runtime.finish()


async def test_what_is_no_agent_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Named by the configuration, or passed by a program."""
    never = f"model.path={MODEL}:build_never"
    named, passed = of_agents(tmp_path, "number", never), config_of(tmp_path, never, "rollout.max_turns=2")
    for config, environment, words in (
        (named, None, "expected a coroutine"),
        (passed, lambda task, policy: 1.0, "the environment that the program passes has no `async def run"),
        (passed, Acts(), "rollout.max_turns is for `async def episode"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with Runtime(config, environment=environment, write=False):
                raise AssertionError


async def test_a_conversation_with_tools_runs_without_a_model(tmp_path: Path) -> None:
    def look(drawer: str) -> str:
        """Looks.

        Args:
            drawer: its name
        """
        return drawer

    async def episode(task: Any, policy: Any) -> float:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
        for number in range(3):
            reply = await policy.chat(messages, tools=[look])
            messages += [reply.message, {"role": "user", "content": f"b{number}"}]
        return 1.0

    context = "rollout.max_context=2000", "train.tokens_per_microbatch=2000"
    async with Runtime(embedded(tmp_path, DRY, *context), write=False) as runtime:
        for _ in range(2):
            group = await runtime.play(episode, [{"role": "user", "content": "a"}])
            assert all(t.turns.size == 3 and t.branches is None for t in group)
        await runtime.finish()


# -- played by a program ---------------------------------------------------------------------------------------------


async def two_turns(task: Any, policy: Any) -> list[float]:
    reply = await policy.complete(task["prompt"])
    await policy.complete(reply.ids + policy.encode("="))
    return [0.25, float(policy.version)]


async def test_a_program_plays_groups_which_are_trained(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, REAL, "data.max_prompt_tokens=30"), write=False) as runtime:
        steps = runtime.steps()
        tasks: list[Any] = ["a3=", {"prompt": "b4=", "answer": "b"}] * 3
        groups = await asyncio.gather(*(runtime.play(two_turns, task) for task in tasks))
        assert all([t.member for t in group] == [0, 1, 2, 3] for group in groups)
        assert all(t.turn_rewards == (0.25, t.reward - 0.25) for group in groups for t in group)
        assert len({tuple(t.tokens) for group in groups for t in group}) > len(groups)
        assert len(await runtime.play(two_turns, "c2=", n=2)) == 2
        assert len(await runtime.play(two_turns, "c3=", n=2)) == 2
        for wrong, words in (({"prompt": "b2="}, "give a list"), ("b2=", "give a list"), ([], "empty")):
            with pytest.raises(DataError, match=words):
                await runtime.evaluate(two_turns, wrong, name="own")
        metrics = await runtime.evaluate(two_turns, ["a3=", {"prompt": "b2="}], name="own")
        assert metrics["eval/own/avg@1"] == 0.25 + runtime.version
        assert await runtime.play(failing("turn", ValueError("no")), "a3=") == []
        # No keys and values of an ended episode are left.
        with anyio.fail_after(60):
            # The engine forgets them in its next step.
            while runtime.built.ports.engine.statistics()["kept_rows"]:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        books = (await runtime.finish()).books
        assert [report.version async for report in steps] == [1, 2, 3, 4]
        assert (books.trained, books.failed) == (8, 1)
        with pytest.raises(LifecycleError, match="takes no more groups"):
            await runtime.play(two_turns, "a3=")


async def test_a_tree_is_trained_at_the_log_probs_at_which_it_was_sampled(tmp_path: Path) -> None:
    """Branches, a changed history and a text of its own: the trainer forwards the tree once, to the log-probs of the sampler."""

    async def episode(task: Any, policy: Any) -> list[float]:
        first = await policy.complete(task["prompt"])
        ids = [*first.ids, *policy.encode("b2=")]
        left, right = await asyncio.gather(*(policy.branch().complete(ids) for _ in range(2)))
        await policy.complete([*left.ids, *policy.encode("c2=")])
        await policy.complete([*first.ids[:-1], *policy.encode("d3=")])
        await policy.complete("e4=")
        await policy.complete([*right.ids, *policy.encode("f2=")])
        return [1.0, 0.0, 1.0, 0.0, 0.5, 0.25, 0.0]

    config = embedded(tmp_path, REAL, "data.max_prompt_tokens=60", "algorithm.mismatch_gate=1e-4", "train.lr=0")
    async with Runtime(config, write=False) as runtime:
        steps = runtime.steps()
        groups = await asyncio.gather(*(runtime.play(episode, {"prompt": prompt}, n=3) for prompt in ("a3=", "c4=")))
        assert len({t.tokens.tobytes() for group in groups for t in group}) == 6
        assert all(len(t.branches) >= 3 and len(t.turns) == 7 and t.reward == 2.75 for group in groups for t in group)
        await runtime.finish()
        [report] = [report async for report in steps]
    assert report.metrics["mismatch/current_tokens"] == sum(t.sampled_length for group in groups for t in group)
    assert report.metrics["mismatch/current_max"] < 1e-3


async def test_a_row_needs_no_prompt_if_the_agent_makes_its_messages(tmp_path: Path) -> None:
    async def episode(task: Any, policy: Any) -> float:
        assert task == {"level": 3}
        await policy.complete(f"level {task['level']}")
        return 1.0

    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        assert [t.reward for t in await runtime.play(episode, {"level": 3}, n=3)] == [1.0] * 3


async def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        with pytest.raises(DataError, match="n is 0"):
            await runtime.play(two_turns, "a3=", n=0)
        with pytest.raises(ConfigError, match="expected `async def episode"):
            await runtime.play(lambda task, policy: 1.0, "a3=")  # type: ignore[arg-type,return-value]
        with pytest.raises(DataError, match="prompt"):
            await runtime.play(two_turns, 3)


@pytest.mark.parametrize(("advantage", "warned", "submits"), [("grpo", 1, False), ("grpo", 1, True), ("none", 0, True)])
async def test_a_group_of_one_is_warned_of_once(
    tmp_path: Path, advantage: str, warned: int, submits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"advantage {advantage} compares the completions of one prompt and would always be 0; expected at least 2"
    overrides = "data.max_prompt_tokens=30", f"algorithm.advantage={advantage}"
    async with Runtime(embedded(tmp_path, REAL, *overrides), write=False) as runtime:
        for _ in range(2):
            if submits:
                await runtime.submit(await runtime.generate("a3=", n=1), [1.0])
            else:
                await runtime.play(two_turns, "a3=", n=1)
        assert caplog.text.count(words) == warned
        await runtime.finish()


async def test_what_is_larger_than_a_microbatch_is_refused(tmp_path: Path) -> None:
    """It would need more memory than was predicted."""
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        group = await runtime.play(two_turns, "a3=", n=2)
        large = [longer(each, 200) for each in await runtime.generate("a3=", n=2)]
        words = r"member 0: all branches have 2\d\d tokens; this run takes 1 to 128 \(train.tokens_per_microbatch\)"
        with pytest.raises(DataError, match=words):
            await runtime.submit(large, [1.0, 0.0])
        assert len(group) == 2
        await runtime.finish()


def longer(trajectory: Any, more: int) -> Any:
    columns = {
        name: np.concatenate([getattr(trajectory, name), np.repeat(getattr(trajectory, name)[-1:], more)])
        for name in ("tokens", "mask", "logprobs", "sampled_logprobs", "versions")
    }
    return replace(trajectory, **columns)


async def test_a_notebook_plays_groups(tmp_path: Path) -> None:
    runtime = await NotebookRuntime(embedded(tmp_path, DRY), write=False).open()
    for _ in range(2):
        assert len(await asyncio.create_task(runtime.play(two_turns, "a3=", n=4))) == 4
    await runtime.close()
    assert runtime.summary().books.trained == 2


# -- what fails ------------------------------------------------------------------------------------------------------


class Own(BaseException):
    """As an interpreter within the environment may have one."""


def failing(where: str, error: Any) -> Any:
    """An agent whose state fails in its reset, in a turn or in its close."""

    class State:
        async def __aenter__(self) -> State:
            if where == "reset":
                raise error
            return self

        async def __aexit__(self, *_: object) -> None:
            if where == "close":
                raise error

    async def episode(task: Any, policy: Any) -> float:
        async with State():
            await policy.complete("a")
            if where == "turn":
                raise error
        return 1.0

    return episode


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *(("turn", error) for error in (ValueError("no browser"), SystemExit(0), asyncio.CancelledError(), Own())),
        ("reset", SystemExit(0)),
        ("close", asyncio.CancelledError()),
    ],
    ids=repr,
)
async def test_an_agent_that_fails_is_played_again_then_counted_and_the_program_goes_on(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    tasks = asyncio.all_tasks()
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        assert await runtime.play(failing(where, error), "a3=") == []
        assert runtime.recorder.drain()["rollout/retries"] >= 2
        for _ in range(2):
            assert len(await runtime.play(two_turns, "a3=")) == 4
        summary = await runtime.finish()
    assert summary.books.failed == 1 and summary.books.trained == 2
    [reason] = summary.reasons
    assert reason.startswith("failed: ") and (type(error).__name__ in reason or "cancelled itself" in reason)
    assert asyncio.all_tasks() == tasks


async def test_more_failures_than_the_budget_end_the_run_and_name_how_to_raise_it(tmp_path: Path) -> None:
    broken = failing("reset", ValueError("no browser"))
    words = "rollout.max_failed_groups allows 1 .* set rollout.max_failed_groups to more, or rollout.keep_viable to"
    async with Runtime(embedded(tmp_path, DRY, "rollout.max_failed_groups=1"), write=False) as runtime:
        assert await runtime.play(broken, "a3=") == []
        for _ in range(2):  # also if the program went on in spite of the error
            with pytest.raises(GenerationError, match=words):
                await runtime.play(broken, "a3=")


@pytest.mark.parametrize(("lost", "left"), [(1, 3), (2, 2), (3, 0)])
async def test_keep_viable_trains_what_is_left_of_a_group(tmp_path: Path, lost: int, left: int) -> None:
    members = itertools.count()

    async def episode(task: Any, policy: Any) -> float:
        number = next(members)
        await policy.complete("a")
        if number < lost:
            raise ValueError("no browser")
        return float(number)

    overrides = "rollout.keep_viable=true", "rollout.retries=0"
    async with Runtime(embedded(tmp_path, DRY, *overrides), write=False) as runtime:
        group = await runtime.play(episode, "a3=")
        assert [(t.member, t.group_size) for t in group] == [(n, left) for n in range(left)]
        assert sorted(t.reward for t in group) == [float(n) for n in range(lost, lost + left)]  # type: ignore[type-var]
        if left:
            assert runtime.recorder.drain()["rollout/lost_members"] == lost
            await runtime.play(two_turns, "a3=")
        summary = await runtime.finish()
    assert summary.books.failed == (left == 0) and summary.books.trained == (2 if left else 0)


async def test_an_episode_beyond_its_time_closes_its_environment_and_its_group_is_counted(tmp_path: Path) -> None:
    closed: list[str] = []

    async def episode(task: Any, policy: Any) -> float:
        try:
            await policy.complete("a")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            closed.append("closed")
        return 1.0

    async with Runtime(embedded(tmp_path, DRY, "rollout.timeout_s=0.5"), write=False) as runtime:
        assert await runtime.play(episode, "a3=") == []
        # The other members of the group are cancelled and close, too.
        assert closed == ["closed"] * 4
        assert "did not end within rollout.timeout_s = # s" in str(runtime.summary().reasons)


async def test_a_play_may_be_cancelled_at_every_await(tmp_path: Path) -> None:
    """Whatever is cancelled closes its environment, gives its slot back and leaves no task."""
    opened = closed = 0
    tasks = asyncio.all_tasks()

    async def episode(task: Any, policy: Any) -> float:
        nonlocal opened, closed
        opened += 1
        try:
            reply = await policy.complete("a")
            await policy.branch().complete(reply.ids)
        finally:
            await asyncio.sleep(0)
            closed += 1
        return 1.0

    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        inner = asyncio.all_tasks()
        for after in range(80):
            player = asyncio.create_task(runtime.play(episode, "a3=", n=2))
            for _ in range(after):
                await asyncio.sleep(0)
            player.cancel()
            await asyncio.wait([player])
            assert opened == closed, after
            if player.cancelled():
                assert runtime.summary().books.live == 0, after
            assert not [task for task in asyncio.all_tasks() - inner if task.get_name().startswith("member")], after
        assert opened > 0
        books = runtime.summary().books
        assert books.admitted == books.trained + books.dropped + books.held + books.claimed + books.live
        await runtime.finish()
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("end", ["cancelled", "closed"])
async def test_a_cleanup_that_hangs_has_a_deadline(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "CLEANUP_S", 0.2)
    monkeypatch.setattr(isolated, "ABANDON_S", 5.0)
    entered, cancelled = asyncio.Barrier(3), 0
    tasks = asyncio.all_tasks()

    async def episode(task: Any, policy: Any) -> float:
        nonlocal cancelled
        try:
            await policy.complete("a")
            await entered.wait()
            await asyncio.sleep(3600)
        finally:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return 1.0

    class Stop(Exception):
        pass

    async def program(players: list[asyncio.Task[Any]]) -> None:
        async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
            player = asyncio.create_task(runtime.play(episode, "a3=", n=2))
            players.append(player)
            await entered.wait()
            if end == "closed":
                raise Stop
            player.cancel()
            with pytest.raises(asyncio.CancelledError):
                await player
            assert runtime.summary().books.live == 0
            await runtime.finish()

    if end == "closed":
        players: list[asyncio.Task[Any]] = []
        with pytest.raises(Stop):
            await program(players)
        with pytest.raises(LifecycleError, match="the Runtime was closed before the group was complete"):
            await players[0]
        assert cancelled == 2
    else:
        await program([])
    assert cancelled == 2 and asyncio.all_tasks() == tasks
