"""A Runtime inside somebody else's event loop: used, closed, broken, cancelled, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch
import uvloop
from runtime_helpers import DRY, MODEL, REAL, ROOT, embedded, feed, train

from asyncrl import Hooks, Runtime, SamplingParams
from asyncrl.config.schema import Config
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import AsyncrlError, DataError, GenerationError, LifecycleError, StallError
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.types import Trajectory

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_generate_submit_steps_finish(tmp_path: Path, loop: str) -> None:
    async def program() -> tuple[list[int], Any]:
        versions: list[int] = []
        async with Runtime(embedded(tmp_path)) as runtime:
            steps = runtime.steps()
            await feed(runtime, 5)
            summary = await runtime.finish()
            async for report in steps:
                versions.append(report.version)
                assert 0 <= report.metrics["reward/mean"] <= 1
                assert report.groups[0].prompt.prompt == "a3="
            with pytest.raises(LifecycleError):
                await runtime.submit(await runtime.generate("b=", n=1), [0.0])
        return versions, summary

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        versions, summary = runner.run(program())
    assert versions == [1, 2, 3]  # the last one smaller
    assert (summary.version, summary.books.trained) == (3, 5)


async def test_a_group_is_trained_at_the_temperature_that_it_was_sampled_at(tmp_path: Path) -> None:
    """Not at the run's: the sampler's log-probs and the trainer's are those of one distribution."""
    async with Runtime(embedded(tmp_path, REAL, "rollout.groups_per_step=1"), write=False) as runtime:
        steps = runtime.steps()
        group = await runtime.generate("a3=", n=4, sampling=SamplingParams(temperature=0.25, max_tokens=8))
        await runtime.submit(group, [0.0, 1.0, 2.0, 3.0])
        await runtime.finish()
        [report] = [report async for report in steps]
    assert {t.temperature for t in group} == {0.25}
    assert report.metrics["mismatch/current_max"] < 1e-4


async def test_runtimes_that_open_at_once_train_as_each_would_alone(tmp_path: Path) -> None:
    """Another seed, so another model: transformers changes torch's functions while it builds one."""
    configs = [embedded(tmp_path, REAL, "rollout.groups_per_step=1", f"seed={seed}") for seed in (0, 7)]

    async def trained(config: Config) -> dict[str, float]:
        async with Runtime(config, write=False) as runtime:
            await feed(runtime, 1)
            [(_, line)] = (await runtime.finish()).history
        return {name: line[name] for name in ("loss", "optim/grad_norm", "reward/mean", "entropy")}

    first, second = await asyncio.gather(*map(trained, configs))
    assert second == await trained(configs[1]) != first


async def test_prompts_are_strings_messages_or_token_ids(tmp_path: Path) -> None:
    config = embedded(tmp_path, REAL | {"model": {"path": f"{MODEL}:build_chat", "dtype": "float32"}})
    async with Runtime(config, write=False) as runtime:
        [text] = await runtime.generate("a3=")
        [messages] = await runtime.generate([{"role": "user", "content": "a3="}])
        ids = runtime.tokenizer.encode("[a3=]=")
        [raw] = await runtime.generate(ids)
        for trajectory in (text, messages, raw):
            assert trajectory.tokens[: trajectory.prompt_length].tolist() == ids
            assert trajectory.versions[trajectory.mask].tolist() == [0] * trajectory.completion_length
        assert isinstance(messages.completion, list) and isinstance(text.completion, str)
    assert not (tmp_path / "runs").exists()


def unusual(t: Trajectory) -> list[tuple[dict[str, Any], str]]:
    """Changes that make a trajectory untrainable, and what is said of it."""
    size = t.tokens.size
    return [
        ({"mask": t.mask[:3]}, f"member 1: mask has 3 entries for {size} tokens"),
        ({"mask": t.mask * 1}, "member 1: mask is int64 of shape"),
        ({"mask": t.mask & False}, "member 1: mask trains no token"),
        ({"logprobs": -t.logprobs}, r"member 1: logprobs\[\d+\] is .* from -87 to 0"),
        ({"sampled_logprobs": t.sampled_logprobs - np.float32("inf")}, r"member 1: sampled_logprobs\[\d+\] is -inf"),
        ({"tokens": t.tokens.tolist()}, "member 1: tokens is list"),
        ({"temperature": 0.0}, "member 1: temperature is 0.0;"),
        ({"prompt_length": 0}, "member 1: prompt_length is 0"),
        ({"completion": "\ud800"}, "member 1: .* lone surrogate"),
        ({"components": {"a": float("inf")}}, "member 1: a is inf"),
    ]


async def test_what_submit_refuses(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        one, other = await runtime.generate("a", n=2), await runtime.generate("b", n=2)
        for trajectories, rewards, words in (
            (one, [1.0], "one reward each"),
            ([], [], "at least one"),
            ([one[0], other[0]], [0.0, 1.0], "one group"),
            (one, [0.0, float("nan")], "finite"),
            (one, [0.0, "1"], "reward of member 1 is '1'; expected a finite number, or None"),
            (one, [0.0, [1.0]], r"reward of member 1 is \[1.0\]; expected a finite number, or None"),
            ([t.completion for t in one], [0.0, 1.0], "trajectory 0 is str; expected an asyncrl.Trajectory"),
            (one[:1], [0.0], "group_size of trajectory 0 is 2, but 1 trajectories were submitted"),
            ([replace(t, member=0) for t in one], [0.0, 1.0], r"the member numbers are \[0, 0\]"),
            *(([one[0], replace(one[1], **changes)], [0.0, 1.0], words) for changes, words in unusual(one[1])),
        ):
            with pytest.raises(ValueError, match=words):
                await runtime.submit(trajectories, rewards)
        assert runtime.summary().books.admitted == 0


BAD_NUMBERS = ["1", float("nan"), float("inf"), [1.0], np.zeros(2), torch.zeros(2), {"a": 1}, 10**400, 1j]
BAD_NAMES = ["", "a//b", "/a", "../a", "a#", "a\n", "x" * 101, 3]


async def test_what_is_no_number_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    runtime = Runtime(embedded(tmp_path, DRY, "reward.overlong.cache=2", "reward.overlong.max_length=8"), write=False)
    with pytest.raises(LifecycleError, match=r"Runtime\.log: the Runtime is new"):
        runtime.log("a", 1.0)
    async with runtime:
        group = await runtime.generate("a", n=2)
        for bad in BAD_NUMBERS:
            with pytest.raises(DataError, match=r"log: tools/calls is .*; expected a finite number"):
                runtime.log("tools/calls", bad)
            for kind in ("components", "metrics"):
                with pytest.raises(
                    DataError, match=rf"submit: {kind}: a of member 1 is .*; expected a finite number, or None"
                ):
                    await runtime.submit(group, [0.0, 1.0], **{kind: {"a": [0.0, bad]}})
        for name in BAD_NAMES:
            with pytest.raises(DataError, match=r"log: .* is not a name"):
                runtime.log(name, 1.0)  # type: ignore[arg-type]
            with pytest.raises(DataError, match=r"evaluate: .* is not a name"):
                await runtime.evaluate(runtime.generate, ["a"], name=name)  # type: ignore[arg-type]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"columns": {"completions": ["a"], "b": 1}}, "columns has 'completions', which the run itself gives"),
            ({"components": {"style": [1.0]}}, "components: style has 1 values for 2 trajectories"),
            ({"components": {"overlong": 1.0}}, "member 0: the component name 'overlong' is reserved"),
        ]
        for given, words in refused:
            with pytest.raises(DataError, match=words):
                await runtime.submit(group, [0.0, 1.0], **given)
        assert runtime.summary().books.admitted == 0
    with pytest.raises(LifecycleError, match=r"Runtime\.log: the Runtime is closed"):
        runtime.log("a", 1.0)


async def test_numbers_of_ones_own_are_means_of_their_step(tmp_path: Path) -> None:
    """Of two groups with two trajectories each; what is logged comes from a thread, too, and after the last step."""
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        steps = runtime.steps()
        thread = threading.Thread(target=runtime.log, args=("seconds", 7))
        thread.start()
        thread.join()
        runtime.log("seconds", torch.tensor(2.0))
        runtime.log("loss", True)  # under a name of its own
        one, other = await runtime.generate("a", n=2), await runtime.generate("b", n=2)
        own: dict[str, Any] = {"turns": torch.tensor([1, 4]), "cost": 0.5}
        assert await runtime.submit(one, [0, 1], components={"style": [1, None]}, metrics=own)
        assert await runtime.submit(other, torch.tensor([2.0, 5.0]), components={"style": (3, 5)}, metrics=own)
        summary = await runtime.finish()
        [step] = [step async for step in steps]
        runtime.log("final", 3)
    found = step.metrics
    assert [t.extras for t in step.groups[0].trajectories] == [{"own/turns": n, "own/cost": 0.5} for n in (1, 4)]
    assert (found["reward/mean"], found["own/seconds"], found["own/loss"], found["loss"]) == (2, 4.5, 1, 0)
    assert (found["reward/style/mean"], found["reward/style/applicable"]) == (3, 0.75)
    assert (found["own/turns"], found["own/cost"]) == (2.5, 0.5)
    assert [line["own/seconds"] for _, line in summary.history] == [4.5]
    assert not any(name.endswith("#") for name in found)
    assert [line["own/final"] for version, line in runtime.summary().history if "own/final" in line] == [3]


async def test_an_evaluation_of_ones_own_loop_stands_in_the_metrics_of_data_eval(tmp_path: Path) -> None:
    """At one version, though a group waits that a step could train; of 2 x 2 episodes one fails."""
    config = embedded(tmp_path, DRY, "rollout.groups_per_step=1", "evaluate.samples=2", "rollout.retries=0")
    begun, fed, versions, played = asyncio.Event(), asyncio.Event(), set(), []

    async def episode(question: str) -> Trajectory:
        number = len(played)
        played.append(question)
        if number == 3:
            begun.set()
        await fed.wait()
        for _ in range(20):
            [trajectory] = await runtime.generate(question)
            versions.update(trajectory.versions[trajectory.mask].tolist())
        if number == 3:
            raise ValueError("no answer")
        return replace(trajectory, reward=number / 2, components={"style": float(number)}, extras={"own/turns": 20})

    async with Runtime(config, write=False) as runtime, asyncio.TaskGroup() as tasks:
        evaluation = tasks.create_task(runtime.evaluate(episode, ["a", "b"], name="tools"))
        await begun.wait()
        assert await runtime.submit(await runtime.generate("c", n=2), [0.0, 1.0])
        fed.set()
        found = await evaluation
        summary = await runtime.finish()
    length = found.pop("eval/tools/completions/mean_length")
    assert 0 < length <= DRY["rollout"]["max_tokens"] and versions == {0}
    expected = {"avg@2": 0.5, "pass@2": 0.5, "style/mean": 1.0, "own/turns/mean": 20.0, "missing": 1.0}
    assert found == {f"eval/tools/{name}": value for name, value in expected.items()}
    lines = {version: line for version, line in summary.history if "eval/tools/avg@2" in line}
    assert [version for version in lines] == [0] and summary.version == 1


@pytest.mark.parametrize("setting", ["train.partial_final_step=false", "train.max_steps=1"])
async def test_groups_that_make_no_step_are_dropped_when_finish_returns(tmp_path: Path, setting: str) -> None:
    async with Runtime(embedded(tmp_path, DRY, setting), write=False) as runtime:
        groups = [await runtime.generate("a", n=2) for _ in range(3)]
        await asyncio.gather(*(runtime.submit(group, [0.0, 1.0]) for group in groups))
        books = (await runtime.finish()).books
    assert (books.live, books.trained, books.dropped) == (0, 2, 1)


async def test_the_limit_of_data_eval_cuts_no_prompts_of_ones_own(tmp_path: Path) -> None:
    played: list[str] = []

    async def episode(question: str) -> Trajectory:
        played.append(question)
        return replace((await runtime.generate(question))[0], reward=1.0)

    async with Runtime(embedded(tmp_path, DRY, f"data.eval={MODEL}:rows", "evaluate.limit=1"), write=False) as runtime:
        await runtime.evaluate(episode, ["a", "b"])
    assert sorted(played) == ["a", "b"]


async def test_what_generate_refuses(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        for prompt, n, words in (
            ("a", 0, "n=0 completions was asked for; expected 1 or more"),
            ("", 1, "the prompt is an empty string"),
            (None, 1, "the prompt is NoneType; expected a string, a list of messages or token ids"),
            ({"role": "user", "content": "a"}, 1, "the prompt is dict; expected a string, a list of messages"),
        ):
            with pytest.raises(DataError, match=words):
                await runtime.generate(prompt, n=n)


async def test_submit_refuses_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, REAL), write=False) as runtime:
        one, other = await runtime.generate("a3=", n=2)
        for token in (-1, 10_000):
            tokens = other.tokens.copy()
            tokens[-1] = token  # predicted, never embedded: only the head would notice
            with pytest.raises(ValueError, match=f"member 1: tokens holds {token}; the model's ids are 0 to"):
                await runtime.submit([one, replace(other, tokens=tokens)], [0.0, 1.0])
        assert runtime.summary().books.admitted == 0
        with pytest.raises(GenerationError):
            await runtime.generate([4] * 10_000, n=2)


async def test_a_member_without_trained_tokens_may_count_in_the_comparison_alone(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        one, other = await runtime.generate("a", n=2)
        silent = replace(other, mask=other.mask & False, metadata={"set_advantage_to_zero": True})
        assert await runtime.submit([one, silent], [0.0, 1.0])
        assert (await runtime.finish()).books.trained == 1


def made_here() -> Callable[[list[str]], list[float]]:
    def share_of_nothing(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    return share_of_nothing


share_of_nothing = made_here()  # it travels by value: its worker would import this file, and all that this file imports


class Failing:
    """An environment whose members fail in ways of their own."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = errors

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Trajectory:
        raise self._errors[member]


async def test_generate_raises_what_it_documents_and_no_group_around_it(tmp_path: Path) -> None:
    first = GenerationError("the engine has no room")
    async with Runtime(embedded(tmp_path, DRY), environment=Failing(first, KeyError("x")), write=False) as runtime:
        with pytest.raises(GenerationError) as caught:
            await runtime.generate("a", n=2)
        assert caught.value is first
        [note] = first.__notes__
        assert note.startswith("afterwards also: GenerationError: member 1 failed in the environment (KeyError: 'x' (")
        assert note.endswith(" in run))") and __file__ in note
    async with Runtime(embedded(tmp_path, DRY), environment=Failing(KeyError("x")), write=False) as runtime:
        with pytest.raises(GenerationError, match=r"member 0 failed in the environment \(KeyError: 'x' ") as caught:
            await runtime.generate("a")
        assert isinstance(caught.value.__cause__, KeyError)


class Unusual:
    """An environment whose trajectories cannot be trained."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Trajectory:
        inner = SingleTurn(ByteTokenizer(), SamplingParams(max_tokens=4), 0)
        trajectory = await inner.run(prompt, member, group_size, generate)
        return replace(trajectory, mask=trajectory.mask[1:])


async def test_what_an_environment_returns_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=r"group \d+ that cannot be trained: member \d: mask has \d+ entries for"):
        await train(tmp_path, base=DRY, environment=Unusual(), rewards=share_of_nothing, write=False)


async def test_a_reader_of_steps_may_leave_early(tmp_path: Path) -> None:
    async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, runtime, 6)
            async for report in runtime.steps():
                assert report.version == 1
                break
        assert (await runtime.finish()).version == 3
        assert [report async for report in runtime.steps()] == []


async def test_opened_once_used_open_closed_where_opened(tmp_path: Path) -> None:
    runtime = Runtime(embedded(tmp_path, DRY), write=False)
    with pytest.raises(LifecycleError, match="new"):
        await runtime.generate("a")
    parts = [name for name, part in vars(Runtime).items() if isinstance(part, property)]
    assert {"version", "tokenizer", "config", "built", "intake"} <= set(parts)
    whole = set(vars(runtime))
    for name in parts:
        with pytest.raises(LifecycleError, match=f"Runtime.{name}: the Runtime is new; use it inside"):
            getattr(runtime, name)
    async with runtime:
        async with asyncio.TaskGroup() as tasks:
            stranger = tasks.create_task(_expect_lifecycle_error(runtime.__aexit__(None, None, None)))
        assert "task that opened it" in stranger.result()
        await feed(runtime, 2)  # and it is still open
        assert set(vars(runtime)) == whole, "an attribute that exists only once it is open"
    for call in (runtime.generate("a"), runtime.submit([], []), runtime.finish(), runtime.run(), runtime.__aenter__()):
        assert "closed" in await _expect_lifecycle_error(call)
    with pytest.raises(LifecycleError, match="closed"):
        runtime.steps()


async def _expect_lifecycle_error(call: Any) -> str:
    with pytest.raises(LifecycleError) as error:
        await call
    return str(error.value)


async def test_the_users_exception_comes_out_unchanged(tmp_path: Path) -> None:
    class MyError(Exception):
        pass

    mine = MyError("mine")
    with pytest.raises(MyError) as caught:
        async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
            await feed(runtime, 3)
            raise mine
    assert caught.value is mine and mine.__cause__ is None and not getattr(mine, "__notes__", [])


async def test_a_pump_that_fails_cancels_the_block_and_its_error_comes_out(tmp_path: Path) -> None:
    cancelled = False
    with pytest.raises(AsyncrlError, match="the disk is full"):
        async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:

            async def broken_publish(version: int) -> None:
                raise AsyncrlError("the disk is full")

            runtime.built.ports.sinks[0].update_weights = broken_publish  # type: ignore[method-assign]
            await feed(runtime, 2)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


class Broken(Exception):
    pass


async def cycle(config: Config, how: str) -> None:
    """Open, train a little, leave: in order, by an exception or by a cancellation from outside."""
    if how == "cancel":
        with anyio.CancelScope() as scope:
            runtime = Runtime(config, rewards=share_of_nothing, write=False)
            async with runtime, anyio.create_task_group() as tasks:
                tasks.start_soon(feed, runtime, 50)
                async for _ in runtime.steps():
                    scope.cancel()
        assert scope.cancelled_caught
        return
    try:
        async with Runtime(config, rewards=share_of_nothing if how == "reward" else (), write=False) as runtime:
            await feed(runtime, 3)
            if how == "raise":
                raise Broken
    except Broken:
        assert how == "raise"


def shared_memory_names() -> list[str]:
    """What lies in /dev/shm and may be of this process: its number is in all names that it gives. Other programs come and go
    meanwhile."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return sorted(name for name in names if str(os.getpid()) in re.split(r"\W", name))


def snapshot() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(child.pid for child in process.children(recursive=True)),
        "descriptors": process.num_fds(),
        "shared memory": shared_memory_names(),
        "tasks": len(asyncio.all_tasks()),
    }


@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])
def test_many_cycles_leave_nothing_behind(tmp_path: Path, loop: str) -> None:
    dry, real = embedded(tmp_path, DRY), embedded(tmp_path)
    ways = ["finish", "raise", "cancel"]

    async def program() -> tuple[dict[str, Any], dict[str, Any]]:
        for config in (dry, real):  # what is loaded once and kept by others: imports, the thread pools of torch
            await cycle(config, "reward")
        gc.collect()
        before = snapshot()
        for number in range(9):
            await cycle(dry, ways[number % 3])
        await cycle(dry, "reward")
        for how in (*ways, "reward"):
            await cycle(real, how)
        gc.collect()
        return before, snapshot()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        before, after = runner.run(program())
    assert after == before


def test_the_example_agent_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "agent_loop.py"
    spec = importlib.util.spec_from_file_location("agent_loop", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    try:
        rewards = asyncio.run(module.main(steps=4))
    finally:
        sys.path[:] = before
        sys.modules.pop("quickstart_model", None)
    assert len(rewards) == 4
    assert capsys.readouterr().out.count("version ") == 4


def test_the_end_of_a_program_that_stands_still_is_named(tmp_path: Path) -> None:
    """No group is live: all are in the step that never ends."""

    async def never(group: object, advantages: object) -> None:
        await asyncio.Event().wait()

    config = embedded(tmp_path, DRY, "preset=sync", "watchdog.stall_timeout_s=1.0", "watchdog.interval_s=0.1")

    async def program() -> None:
        async with Runtime(config, write=False, hooks=Hooks(after_advantages=never)) as runtime:
            await feed(runtime, 2)
            await runtime.finish()

    said = r"nothing was generated, .* train pump waits for group \d+ from hook after_advantages for .* never"
    with pytest.raises(StallError, match=said):
        asyncio.run(asyncio.wait_for(program(), 60))
