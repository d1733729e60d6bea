"""Reward functions as users write them, well- and ill-behaved; loaded by the workers from this file."""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from fractions import Fraction

CALLS = 0


def match(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def length(completions):
    return [len(c) for c in completions]


def odd_only(completion_ids):
    return [1.0 if sum(ids) % 2 else None for ids in completion_ids]


async def asynchronous(completions, **columns):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


async def same_loop(completions):
    """1.0 when the loop of the first call is still the one of this call: clients bound to a loop keep working."""
    global LOOP
    try:
        return [float(asyncio.get_running_loop() is LOOP)] * len(completions)
    except NameError:
        LOOP = asyncio.get_running_loop()
        return [-1.0] * len(completions)


def chat(completions, prompts):
    return [
        float(c == [{"role": "assistant", "content": "a"}] and p[0]["role"] == "user")
        for c, p in zip(completions, prompts, strict=True)
    ]


def column_types(completions, info):
    value = info[0]
    exact = isinstance(value["pair"], tuple) and value["nan"] != value["nan"] and isinstance(value["set"], set)
    return [float(exact and value[7] == "seven")] * len(completions)


def raises(completions):
    return inner(completions)


def inner(completions):
    raise KeyError("no such answer")


def leaves(completions):
    sys.exit(3)


def exits(completions):
    os._exit(7)


def segfaults(completions):
    ctypes.string_at(0)


def sleeps(completions):
    time.sleep(60)


def by_order(completions):
    """Behaves as the completion says."""
    word = completions[0]
    if word == "sleep":
        time.sleep(60)
    if word == "exit":
        os._exit(7)
    if word.startswith("nap"):
        time.sleep(0.05)
    return [float(os.getpid())] * len(completions)


def comes_back_twice(completions):
    """A fork that forgets to exit: the child is done first, and returns from here as well."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return [1.0 if child else 666.0] * len(completions)


def prints(completions):
    print("a line on stdout")
    print("a line on stderr", file=sys.stderr)
    os.write(1, b"raw bytes on descriptor 1\n")
    return [1.0] * len(completions)


def leaves_an_alarm(completions):
    """Arms a timer and forgets it: it must not ring in `naps`, which the same worker is asked next."""

    def ring(*_):
        raise TimeoutError("an alarm of an earlier call")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return [1.0] * len(completions)


def naps(completions):
    time.sleep(0.15)
    return [float(os.getpid())] * len(completions)


def timed(seconds):
    """The decorator of math-verify and of many graders: an alarm around each answer, the old handler back afterwards."""

    def decorate(function):
        def wrapper(*args):
            def ring(*_):
                raise TimeoutError("took too long")

            old = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return function(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)

        return wrapper

    return decorate


@timed(0.25)
def _grade(text):
    while text == "for ever":  # no sleep: what a symbolic simplification looks like from outside
        pass
    return float(len(text))


def math_verify_like(completions):
    """Answers of one batch, one of which never ends: 0 for that one, the others are scored."""
    scores = []
    for text in completions:
        try:
            scores.append(_grade(text))
        except TimeoutError:
            scores.append(0.0)
    return scores


def report(completions):
    """Facts about the process."""
    return [
        float(os.nice(0)),
        float(os.environ["OMP_NUM_THREADS"]),
        float("torch" in sys.modules or "numpy" in sys.modules),
        float(multiprocessing.parent_process() is None and os.getsid(0) == os.getpid()),
        float(len(os.listdir("/proc/self/fd"))),
    ]


def counts(completions):
    global CALLS
    CALLS += 1
    return [float(CALLS)] * len(completions)


def closes_everything(completions):
    os.closerange(3, 64)
    time.sleep(60)


def vandal(completions):
    """Writes into the protocol's socket."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                os.write(int(entry), b"x" * 64)
    return [1.0] * len(completions)


def too_few(completions):
    return [1.0]


def not_a_number(completions):
    return [0.0, float("nan")]


def one_of_each(completions):
    return [float("nan"), 0.5, None, "good"]


def logs(completions, log_metric, log_extra, trainer_state, **columns):
    """As a function of TRL's does."""
    log_metric("accuracy", 0.5)
    log_metric(name="accuracy", value=1)
    log_extra("text", completions)
    log_extra(column="odd", values=[True])
    log_extra("odd", [Fraction(1, 3)])
    log_extra("nested", [{7: (1, float("nan"))}] * len(completions))
    assert trainer_state.epoch == 2.0
    return [trainer_state.global_step + 2 / trainer_state.max_steps] * len(completions)


async def logs_later(completions, **given):
    await asyncio.sleep(0)
    return logs(completions, **given)


def logs_too_few(completions, log_extra):
    log_extra("text", completions[:1])
    return [0.0] * len(completions)


def nothing(completions):
    return None


HERE = 0
ALL_HERE = asyncio.Event()


async def meets(completions):
    """Ends once as many calls are under way in this process as the completion says."""
    global HERE
    HERE += 1
    if int(completions[0]) == HERE:
        ALL_HERE.set()
    await ALL_HERE.wait()
    return [float(os.getpid())] * len(completions)


async def meets_verl(solution_str, ground_truth):
    return {"score": (await meets([solution_str]))[0]}


class Meets:
    __name__ = "meets_object"

    async def __call__(self, completions):
        return await meets(completions)

    async def score_answer(self, answer, entry):
        return (await meets([answer]))[0]


meets_object = Meets()
meets_gym = meets_object.score_answer
crowd_now = 0


async def crowd(completions):
    """How many calls were under way."""
    global crowd_now
    crowd_now += 1
    found = crowd_now
    await asyncio.sleep(0.02)
    crowd_now -= 1
    return [float(found)] * len(completions)


async def judges(completions):
    """Waits as the completion says: for ever, whatever cancels it, or until there is a file of that name."""
    word = completions[0]
    if word == "exit":
        os._exit(7)
    while word == "deaf":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    if word == "sleep":
        await asyncio.sleep(3600)
    while word.startswith("/") and not os.path.exists(word):  # noqa: ASYNC110, ASYNC240  another process makes it
        await asyncio.sleep(0.01)
    return [float(os.getpid())] * len(completions)


def blocks(completions):
    """Not async, with a loop of its own."""
    if completions[0] == "block":
        asyncio.run(asyncio.sleep(0.4))
    return [0.0] * len(completions)


async def flaky(completions):
    """As a judge over HTTP that is overloaded twice."""
    global CALLS
    CALLS += 1
    if CALLS < 3:
        raise ConnectionError(f"answer {CALLS}: 429")
    return [float(CALLS)] * len(completions)


def needs(completions, solution):
    return [0.0] * len(completions)


NOT_A_FUNCTION = 3


def half(completions, **columns):
    """Half a point; not applicable to what begins with n."""
    return [None if text.startswith("n") else 0.5 for text in completions]


TABLE = []
LEAK = []


def leaks(completions):
    """Loads 48 MiB in its first call, as a model would be, and loses what the completion says, in MiB, in each."""
    if not TABLE:
        TABLE.append(b"x" * (48 << 20))
    LEAK.append(b"x" * (int(completions[0]) << 20))
    return [float(os.getpid())]


def waits_for(completions):
    """Until there is a file of that name, if one is named."""
    while completions[0] and not os.path.exists(completions[0]):
        time.sleep(0.01)
    return [float(os.getpid())]


def kills_its_group(completions):
    """As a grader does that wants to be rid of what it has started."""
    os.killpg(0, signal.SIGKILL)


def takes_key(completions, api_key):
    assert api_key == "key"
    return [1.0] * len(completions)


def of_episodes(completions, num_turns, tool_calls, notes, **columns):
    """What a function of an agent's episode sees."""
    assert "num_turns" not in columns and all(isinstance(each, list) for each in completions)
    names = [[call["function"]["name"] for call in calls] for calls in tool_calls]
    return [[float(turn + len(names[i]) + notes[i]["tries"]) for turn in range(n)] for i, n in enumerate(num_turns)]


def per_turn(completions):
    """A value for each completion, as its text says."""
    return [eval(text) for text in completions]


def parts(completions):
    """Two components and a number beside them."""
    wrong = {
        "missing": {"a": 1.0},
        "number": 0.5,
        "nothing": None,
        "error": ValueError("no judge"),
        "bad": {"a": "x", "b": 1},
    }
    return [wrong.get(text, {"a": 0.5, "b": len(text), "seen": 1}) for text in completions]
