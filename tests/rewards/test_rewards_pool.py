"""The reward pool with real worker processes: what functions get, what they may return, what happens when they fail."""

import asyncio
import math
import os
import subprocess
import sys
from array import array
from collections import deque
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import psutil
import pytest
import rewards_functions
import torch
from rewards_helpers import FILE, pool, pool_of, prompt, score, trajectories
from warm import children

from asyncrl.concurrency.channel import encode
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, LifecycleError, RewardCrash, RewardError, RewardTimeout
from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.forms import UsageError
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.worker import as_list, check_scores
from asyncrl.telemetry.recorder import Recorder

# ---- what a function is given, and what comes back


async def test_scores_become_components_and_their_weighted_sum():
    recorder = Recorder()
    specs = [
        RewardSpec(f"{FILE}:match", weight=2.0),
        RewardSpec(f"{FILE}:length", weight=0.1, name="chars"),
        RewardSpec(f"{FILE}:odd_only"),
    ]
    given = trajectories("yes", "no!!", ids=[(5, 1), (5, 2)])
    async with pool_of(specs, recorder, workers=2) as rewards:
        assert tuple(rewards.weights) == ("match", "chars", "odd_only")
        scored = await rewards.score(prompt(answer="yes"), given)
    assert [t.components for t in scored] == [
        {"match": 1.0, "chars": 3.0, "odd_only": None},
        {"match": 0.0, "chars": 4.0, "odd_only": 1.0},
    ]
    assert [t.reward for t in scored] == pytest.approx([2.3, 1.4])
    assert [t.tokens is g.tokens for t, g in zip(scored, given, strict=True)] == [True, True]
    metrics = recorder.drain()
    assert metrics["time/reward"] > 0
    assert not recorder.active_waits()
    assert {e.name for e in recorder.events()} >= {"reward/match", "reward/chars", "reward/odd_only"}


async def test_async_functions_share_one_loop_over_calls():
    async with pool("asynchronous", "same_loop") as rewards:
        first = await score(rewards)
        second = await score(rewards)
    assert first.components == {"asynchronous": 0.5, "same_loop": -1.0}
    assert second.components == {"asynchronous": 0.5, "same_loop": 1.0}


async def test_conversational_prompts_pass_messages():
    messages = [{"role": "user", "content": "q"}]
    async with pool("chat") as rewards:
        scored = await rewards.score(
            prompt(text=messages),
            trajectories([{"role": "assistant", "content": "a"}], [{"role": "x", "content": "a"}]),
        )
    assert [t.reward for t in scored] == [1.0, 0.0]


async def test_columns_arrive_as_the_objects_they_were():
    info = {"pair": (1, 2), "nan": math.nan, "set": {1}, 7: "seven"}
    async with pool("column_types") as rewards:
        assert (await rewards.score(prompt(info=info), trajectories("a")))[0].reward == 1.0


async def test_a_callable_travels_by_value_or_by_the_name_of_its_module():
    bonus = 0.25

    def closure(completions):
        return [bonus for _ in completions]

    class Scorer:
        def __call__(self, completions, **columns):
            return [len(c) for c in completions]

    named = RewardSpec(rewards_functions.length)  # of a module: that one is imported
    async with pool_of([RewardSpec(closure), RewardSpec(Scorer(), name="scorer"), named]) as rewards:
        scored = await score(rewards, "ab")
    assert scored.components == {"closure": 0.25, "scorer": 2.0, "length": 2.0}


async def test_no_functions_leave_the_environments_reward_alone_and_functions_add_to_it():
    given = [replace(trajectories("abc")[0], reward=1.0, components={"env": 1.0})]
    async with pool_of([]) as rewards:
        assert await rewards.score(prompt(), given) == given
    async with pool("length") as rewards:
        scored = await rewards.score(prompt(), given)
        assert await rewards.score(prompt(), []) == []
    assert scored[0].reward == 4.0
    assert scored[0].components == {"env": 1.0, "length": 3.0}


async def test_a_group_is_one_call_of_each_function_in_a_worker_that_keeps_its_state():
    """TRL's form is batched: what loads a model or asks a judge does it once for all completions of a prompt."""
    async with pool("counts", "length") as rewards:
        for call in (1.0, 2.0):
            scored = await rewards.score(prompt(), trajectories("a", "bb", "ccc"))
            assert [t.components for t in scored] == [{"counts": call, "length": float(n)} for n in (1, 2, 3)]
    assert rewards_functions.CALLS == 0  # never in this process


async def test_the_worker_process_is_humble():
    async with pool("report") as rewards:
        scored = await rewards.score(prompt(), trajectories(*"abcde"))
    niceness, threads, heavy, own_session, descriptors = (t.reward for t in scored)
    assert niceness >= 10
    assert (threads, heavy, own_session) == (1.0, 0.0, 1.0)
    assert descriptors <= 8  # stdio, the socket, listdir's own; none of ours


async def test_from_config():
    config = RewardConfig(functions=({"function": f"{FILE}:length", "weight": 3.0},), workers=1, timeout_s=5.0)
    async with RewardPool(config) as rewards:
        assert (await score(rewards, "ab")).reward == 6.0


# ---- answers that are none


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_few", "1 values for 2 completions"),
        ("not_a_number", "nan (float) for member 1; expected finite numbers or None"),
        ("nothing", "returned None (NoneType); expected a list with a number or None for each of the 2 completions"),
        ("needs", "needs 'solution'"),
    ],
)
async def test_an_unusable_answer_names_function_and_value(name, words):
    async with pool(name) as rewards:
        with pytest.raises(RewardError) as caught:
            await rewards.score(prompt(answer="a"), trajectories("a", "b"))
    assert repr(name) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("policy", "instead"), [("none", None), ("zero", 0.0)])
async def test_what_is_no_score_concerns_its_member_alone(policy, instead, caplog):
    recorder = Recorder()
    async with pool("one_of_each", on_error=policy, recorder=recorder) as rewards:
        scored = await rewards.score(prompt(group_id=7), trajectories(*"abcde")[1:])
    assert [t.reward for t in scored] == [instead, 0.5, None, instead]
    assert recorder.drain()["reward/one_of_each/errors"] == 1
    assert "(group 7): it returned nan (float) for member 1, 'good' (str) for member 4; expected" in caplog.text


def numpy_array():
    return np.array([1.0, 0.5], dtype=np.float16)


RIGHT = {
    "list": lambda: [1, Fraction(1, 2)],
    "tuple": lambda: (True, Decimal("0.5")),
    "deque": lambda: deque([1.0, 0.5]),
    "array": lambda: array("d", [1.0, 0.5]),
    "generator": lambda: (value for value in (1, 0.5)),
    "map": lambda: map(float, ("1", "0.5")),
    "numpy": numpy_array,
    "scalars of numpy": lambda: list(numpy_array()),
    "scalars of torch": lambda: [torch.tensor(1, dtype=torch.int8), torch.tensor(0.5, requires_grad=True)],
    "torch": lambda: torch.tensor([1.0, 0.5], dtype=torch.bfloat16, requires_grad=True),
    "pandas": lambda: pytest.importorskip("pandas").Series([1.0, 0.5], index=[1, 0]),
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_what_has_an_order_is_taken(answer):
    assert check_scores(as_list(answer(), 2)) == ([1.0, 0.5], [])


UNORDERED = {
    "set": {1.0, 0.5},
    "frozenset": frozenset({1.0, 0.5}),
    "dict": {0: 1.0, 1: 0.5},
    "keys": {1.0: 0, 0.5: 1}.keys(),
    "values": {0: 1.0, 1: 0.5}.values(),
    "text": "10",
    "bytes": b"10",
    "bytearray": bytearray(b"10"),
    "number": 1.0,
    "scalar": np.float32(1.0),
    "matrix": np.ones((2, 1)),
}


@pytest.mark.parametrize("answer", UNORDERED.values(), ids=UNORDERED)
def test_what_has_no_order_is_refused_with_its_type(answer):
    with pytest.raises(UsageError, match="a number or None for each of the 2 completions, in their order") as caught:
        as_list(answer, 2)
    assert f"({type(answer).__name__})" in str(caught.value)


NO_SCORES = [
    1j,
    np.complex64(1),
    torch.tensor(1j),
    "1",
    b"1",
    [1.0],
    np.ones(1),
    10**400,
    pytest.param(10**5000, id="10**5000"),
    math.inf,
    np.nan,
    Decimal("sNaN"),
    {},
]


@pytest.mark.parametrize("value", NO_SCORES, ids=repr)
def test_a_value_that_is_no_finite_number_is_named(value):
    scores, wrong = check_scores([0.5, value, None])
    assert scores == [0.5, None, None] and [place for place, _ in wrong] == [1] and type(value).__name__ in wrong[0][1]


# ---- what a function logs, as under TRL


@pytest.mark.parametrize("name", ["logs", "logs_later"])
async def test_trls_arguments_reach_trajectories(name):
    async with pool(name) as rewards:
        rewards.progress = lambda: {"global_step": 3, "max_steps": 8}
        scored = await rewards.score(replace(prompt(), epoch=2), trajectories("a", "bb"))
    assert [t.reward for t in scored] == [3.25, 3.25]  # 3 + 2 / 8
    mine = {"accuracy": 0.75, "nested": {"7": [1, None]}}
    assert [t.extras for t in scored] == [
        {f"{name}/{key}": value for key, value in {**mine, "text": text, "odd": odd}.items()}
        for text, odd in (("a", True), ("bb", "1/3"))
    ]


async def test_a_column_of_another_length_is_refused():
    async with pool("logs_too_few") as rewards:
        with pytest.raises(RewardError, match=r"log_extra\('text', ...\) was given 1 values for 2 completions"):
            await rewards.score(prompt(), trajectories("a", "b"))


@pytest.mark.parametrize("by_mapping", [True, False])
async def test_a_metric_and_a_column_of_one_name_are_refused(by_mapping):
    def function(completions, log_metric, log_extra):
        log_metric("size", 1)
        if not by_mapping:
            log_extra("size", completions)
        return [{"score": 1.0, **({"size": 1} if by_mapping else {})}] * len(completions)

    async with pool_of([RewardSpec(function)]) as rewards:
        with pytest.raises(RewardError, match="log_metric and a logged column have the same name, 'size'; rename"):
            await rewards.score(prompt(), trajectories("a"))


# ---- functions that fail


async def test_an_exception_carries_the_remote_traceback_and_the_worker_goes_on():
    async with pool("raises", "length") as rewards:
        for _ in range(2):
            with pytest.raises(RewardError) as caught:
                await rewards.score(prompt(group_id=4), trajectories("a"))
    text = str(caught.value)
    assert "reward 'raises' failed (group 4): KeyError: 'no such answer'" in text
    assert 'rewards_functions.py", line' in text and "in inner" in text
    assert "worker.py" not in text


@pytest.mark.parametrize(("name", "how"), [("exits", "exited with status 7"), ("segfaults", "killed by SIGSEGV")])
async def test_a_crash_names_function_and_status_and_the_worker_is_replaced(name, how):
    async with pool(name) as rewards:
        pids = set()
        for _ in range(2):
            with pytest.raises(RewardCrash) as caught:
                await score(rewards)
            assert f"reward {name!r} crashed" in str(caught.value) and how in str(caught.value)
            pids.add(next(word for word in str(caught.value).split() if word.isdigit() and int(word) > 7))
    assert len(pids) == 2


async def test_a_deadline_kills_the_worker_names_it_and_the_next_call_works():
    async with pool("by_order", timeout_s=1.0) as rewards:
        before = (await score(rewards, "go")).reward
        with pytest.raises(RewardTimeout) as caught:
            await rewards.score(prompt(group_id=9), trajectories("sleep"))
        assert f"reward 'by_order' did not answer within 1 s (group 9); its worker {before:.0f}" in str(caught.value)
        after = (await score(rewards, "go")).reward
    assert after != before
    assert not psutil.pid_exists(int(before))


@pytest.mark.parametrize(("policy", "component", "reward"), [("none", None, 3.0), ("zero", 0.0, 3.0)])
async def test_the_error_policy_counts_instead_of_failing(policy, component, reward, caplog):
    recorder = Recorder()
    async with pool("exits", "leaves", "raises", "length", on_error=policy, recorder=recorder) as rewards:
        scored = await score(rewards, "abc")
    assert scored.components == {"exits": component, "leaves": component, "raises": component, "length": 3.0}
    assert scored.reward == reward
    metrics = recorder.drain()
    assert metrics["reward/exits/errors"] == metrics["reward/raises/errors"] == 1
    assert all(words in caplog.text for words in ("status 7", "SystemExit: 3", "KeyError"))
    async with pool("raises", on_error=policy) as rewards:
        assert (await score(rewards)).reward == component  # nothing applies: no reward


async def test_a_failing_function_does_not_wait_for_a_slow_one():
    async with pool("raises", "sleeps", workers=2, timeout_s=200) as rewards:
        async with asyncio.timeout(40):  # the slow one sleeps for 60 seconds
            with pytest.raises(RewardError, match="KeyError"):
                await score(rewards)


async def test_a_fork_that_comes_back_does_not_answer():
    async with pool("comes_back_twice") as rewards:
        answers = [(await score(rewards)).reward for _ in range(3)]
    assert answers == [1.0, 1.0, 1.0]


async def test_a_stale_answer_is_discarded():
    """The reply to an older request lies in front of the reply that is waited for."""
    async with pool("counts") as rewards:
        worker = next(iter(rewards._alive))
        worker._child.channel._received += encode({"id": 1, "grown": 0, "answer": {"scores": [666.0]}})
        assert (await score(rewards)).reward == 1.0


@pytest.mark.parametrize(("name", "words"), [("closes_everything", "closed the protocol"), ("vandal", "no message")])
async def test_a_worker_that_breaks_its_socket_is_replaced(name, words):
    async with pool(name, "length") as rewards:
        for _ in range(2):
            with pytest.raises(RewardCrash, match=words):
                await score(rewards)


async def test_prints_go_to_stderr_and_do_not_disturb(capfd):
    async with pool("prints") as rewards:
        assert (await score(rewards)).reward == 1.0
    out, err = capfd.readouterr()
    assert out == ""
    for line in ("a line on stdout", "a line on stderr", "raw bytes on descriptor 1"):
        assert line in err


async def test_alarms_around_every_answer_as_math_verify_has_them():
    async with pool("math_verify_like") as rewards:
        for _ in range(2):  # and the worker is as good afterwards
            scored = await rewards.score(prompt(), trajectories("12", "for ever", "7"))
            assert [t.reward for t in scored] == [2.0, 0.0, 1.0]


async def test_an_alarm_that_was_left_behind_does_not_ring_in_the_next_call():
    async with pool("leaves_an_alarm", "naps") as rewards:  # one worker: one after the other
        first, second = [(await score(rewards)) for _ in range(2)]
    assert first.components["naps"] == second.components["naps"] > 0  # the same process all the time


async def test_ten_megabytes_each_way_of_a_call():
    text = "x" * 10_000_000
    async with pool("length", "match") as rewards:
        scored = await rewards.score(prompt(answer=text), trajectories(text))
    assert scored[0].components == {"length": 1e7, "match": 1.0}


# ---- opening


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (f"{FILE}:lenght", "did you mean 'length'"),
        (f"{FILE}:NOT_A_FUNCTION", "not a function"),
        ("/nowhere/rewards.py:f", "there is no file /nowhere/rewards.py"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("just_a_name", "is not an address"),
    ],
)
async def test_a_function_that_cannot_be_loaded_fails_the_start(address, words):
    with pytest.raises(ConfigError, match=words) as caught:
        async with pool_of([RewardSpec(address)], workers=2):
            raise AssertionError("opened")
    assert address in str(caught.value)


async def test_an_import_error_of_the_users_file_names_path_and_cause(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import math\nimport not_there_at_all\n")
    with pytest.raises(ConfigError) as caught:
        await pool_of([RewardSpec(f"{file}:f")]).__aenter__()
    assert str(file) in str(caught.value)
    assert "ModuleNotFoundError: No module named 'not_there_at_all'" in str(caught.value)
    assert str(caught.value).endswith(f"({file}:2)") and "\n" not in str(caught.value)


async def test_a_crash_during_the_import_fails_the_start(tmp_path):
    file = tmp_path / "crashing.py"
    file.write_text("import os\nos._exit(5)\n")
    with pytest.raises(RewardCrash, match=r"exited with status 5 while it loaded .*crashing.py:f"):
        await pool_of([RewardSpec(f"{file}:f")]).__aenter__()


async def test_neighbours_of_the_users_file_can_be_imported(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 4.0\n")
    (tmp_path / "user.py").write_text(
        "import neighbour_of_reward\ndef f(completions): return [neighbour_of_reward.VALUE for _ in completions]\n"
    )
    async with pool_of([RewardSpec(f"{tmp_path / 'user.py'}:f")]) as rewards:
        assert (await score(rewards)).reward == 4.0


async def test_a_worker_that_cannot_be_replaced_fails_everybody(tmp_path):
    file = tmp_path / "changing.py"
    file.write_text("import os\ndef f(completions): os._exit(1)\n")
    async with pool_of([RewardSpec(f"{file}:f")]) as rewards:
        file.write_text("1/0\n")
        with pytest.raises(RewardCrash):
            await score(rewards)
        with pytest.raises(RewardError, match=r"cannot be replaced.*ZeroDivisionError"):
            await score(rewards)


async def test_equal_names_are_refused():
    with pytest.raises(ConfigError, match="named 'length'"):
        await pool("length", "length").__aenter__()
    await asyncio.sleep(0)
    assert not children()


async def test_used_new_or_closed():
    rewards = pool("length")
    with pytest.raises(LifecycleError, match="not open"):
        await score(rewards)
    async with rewards:
        pass
    with pytest.raises(LifecycleError, match="not open"):
        await score(rewards)


def test_workers_import_nothing_heavy():
    heavy = ("torch", "numpy", "pydantic", "anyio")
    code = f"import sys, asyncrl.rewards.worker; print([m for m in {heavy} if m in sys.modules])"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert answer.stdout.strip() == "[]"
