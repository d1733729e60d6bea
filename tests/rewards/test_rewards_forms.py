"""verl's and reasoning-gym's rewards as they stand, in real workers."""

import asyncio
from pathlib import Path

import cloudpickle
import pytest
from rewards_helpers import FILE, pool_of, prompt, trajectories

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.forms import UsageError, as_trl, brief
from asyncrl.rewards.worker import load_functions

PROGRAM = '''
import asyncio, dataclasses

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k", data_source
    return {"score": float(solution_str == ground_truth) + len(extra_info), "acc": 1.0}

def short(solution_str, ground_truth, method="strict", **kwargs):
    assert method == "strict" and not kwargs
    return solution_str == ground_truth

def needs_info(solution_str, ground_truth, extra_info, difficulty):
    return len(extra_info) + difficulty

def needs_notes(solution_str, ground_truth, notes, base_url=-1):
    return notes + base_url

async def compute_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return None if ground_truth is None else float(solution_str == ground_truth)

def parts(solution_str, ground_truth):
    if solution_str == "no":
        return 0.5
    right = solution_str == ground_truth
    return {"score": right, "correct": right, "said": solution_str, **({} if right else {"near": 1.0})}

async def parts_later(solution_str, ground_truth):
    await asyncio.sleep(0)
    return parts(solution_str, ground_truth)

def odd(solution_str, ground_truth):
    return {"acc": 1.0}

def raises(solution_str, ground_truth):
    raise LookupError("no such answer")

class Data:
    """What is used of a reasoning-gym data set."""

    def score_answer(self, answer, entry):
        more = entry.get("notes", 0) + entry.get("base_url", 0)
        return more + float(answer == entry["answer"]) + 0.1 * entry["metadata"]["level"] * (entry["question"] == "question")

data = Data()

def dataset():
    return data

def trl(completions, **columns):
    assert "num_turns" not in columns
    return [a + b for a, b in zip(columns["notes"], columns["base_url"], strict=True)]

def nothing():
    return 3

def broken():
    return {}["gone"]
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "forms.py").write_text(PROGRAM)
    return f"{tmp_path}/forms.py"


async def scored(address: str, *completions: object, **columns: object) -> list[float | None]:
    async with pool_of([RewardSpec(address)]) as rewards:
        return [t.reward for t in await rewards.score(prompt(**columns), trajectories(*completions))]


VERL = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}, "ability": "math"}


async def test_verl_with_its_own_columns(file: str) -> None:
    assert await scored(f"{file}:compute_score", "7", "8", **VERL) == [1.0, 0.0]
    assert await scored(f"{file}:compute_score", "7", **VERL, extra_info={"a": 1, "b": 2}) == [3.0]
    assert await scored(f"{file}:compute_later", "7", "8", **VERL) == [1.0, 0.0]
    assert await scored(f"{file}:compute_later", "7", data_source="x", ground_truth=None) == [None]
    assert await scored(f"{file}:short", "7", "8", ground_truth="8") == [0.0, 1.0]
    assert await scored(f"{file}:needs_info", "7", ground_truth="8", difficulty=2) == [2.0]


@pytest.mark.parametrize(("name", "value"), [("needs_notes", 5.0), ("trl", 5.0), ("data", 6.0)])
async def test_a_column_reaches_functions_that_do_not_take_the_runs_argument_of_its_name(
    file: str, name: str, value: float
) -> None:
    columns = {"ground_truth": "7", "answer": "7", "metadata": {"level": 0}, "notes": 2, "base_url": 3}
    async with pool_of([RewardSpec(f"{file}:{name}", name="form"), RewardSpec(f"{FILE}:takes_key")]) as rewards:
        rewards.open_endpoint = lambda: ("url", "key")
        [found] = await rewards.score(prompt(**columns), trajectories("7"))
    assert found.components == {"form": value, "takes_key": 1.0}


@pytest.mark.parametrize("name", ["parts", "parts_later"])
async def test_what_verls_dictionary_has_beside_its_score_is_logged(file: str, name: str) -> None:
    async with pool_of([RewardSpec(f"{file}:{name}")]) as rewards:
        scored = await rewards.score(prompt(ground_truth="7"), trajectories("7", "8", "no"))
    assert [t.components for t in scored] == [{name: 1.0}, {name: 0.0}, {name: 0.5}]
    keys = [f"{name}/{key}" for key in ("correct", "said", "near")]
    rows = [(True, "7", None), (False, "8", 1.0), (None, None, None)]
    assert [t.extras for t in scored] == [dict(zip(keys, row, strict=True)) for row in rows]


async def test_verl_gets_the_text_of_a_conversation(file: str) -> None:
    assert await scored(f"{file}:short", [{"role": "assistant", "content": "7"}], ground_truth="7") == [1.0]


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "compute_score",
            {"answer": "7", "question": "q"},
            'needs the columns data_source, ground_truth (or reward_model with "ground_truth" in it); the columns of the '
            "data are: answer, question",
        ),
        ("compute_score", {}, "the columns of the data are: none"),
        ("needs_info", VERL, "needs the columns difficulty; the columns of the data are: ability, data_source, reward_m"),
        ("odd", VERL, "it returned {'acc': 1.0} (dict) for member 0; expected finite numbers or None, or mappings with 'score'"),
        ("data.score_answer", {"solution": "7"}, "reasoning-gym data set (question, answer, metadata); the columns of the "
         "data are: solution"),
    ],
)  # fmt: skip
async def test_missing_columns_are_named_beside_those_that_are_there(
    file: str, name: str, columns: dict[str, object], message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        await scored(f"{file}:{name}", "7", **columns)
    assert message in str(caught.value) and "Traceback" not in str(caught.value)


async def test_an_error_in_a_score_shows_the_users_lines_only(file: str) -> None:
    with pytest.raises(RewardError) as caught:
        await scored(f"{file}:raises", "7", ground_truth="7")
    assert "LookupError: no such answer" in str(caught.value) and "in raises" in str(caught.value)
    assert "asyncrl/rewards" not in str(caught.value)


def test_only_a_text_that_was_cut_ends_in_dots() -> None:
    whole, longer = "x" * 78, "x" * 79  # 80 and 81 characters with their quotes
    assert (brief(whole), brief(longer)) == (f"'{whole}' (str)", f"'{longer}... (str)")


@pytest.mark.parametrize("name", ["data", "data.score_answer", "dataset"])
async def test_reasoning_gym_by_data_set_method_or_function(file: str, name: str) -> None:
    entry = {"answer": "7", "metadata": {"level": 5}}
    completions = ["so <answer> 7</answer>", "<answer>7</answer> no, <answer>8</answer>", " 7\n"]
    assert await scored(f"{file}:{name}", *completions, **entry) == [1.5, 0.5, 1.5]


async def test_the_others_of_a_call_are_cancelled_where_one_fails() -> None:
    cancelled: list[str] = []

    async def compute(solution_str: str, ground_truth: str) -> float:
        if solution_str == "bad":
            raise ValueError(solution_str)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(solution_str)
            raise
        return 0.0

    with pytest.raises(ValueError, match="bad"):
        await as_trl(compute, "here")(completions=["a", "bad", "b"], ground_truth=["1"] * 3)
    await asyncio.sleep(0)
    assert cancelled == ["a", "b"]


@pytest.mark.slow
async def test_a_real_reasoning_gym_data_set(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym")
    (tmp_path / "gym.py").write_text(
        "import reasoning_gym\ndef data(): return reasoning_gym.create_dataset('leg_counting', size=5, seed=3)\n"
    )
    entry = gym.create_dataset("leg_counting", size=5, seed=3)[2]
    assert await scored(f"{tmp_path}/gym.py:data", f"<answer>{entry['answer']}</answer>", "no", **entry) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "takes no arguments and returned 3 (int); expected a reward function, like f(completions, **col"),
        ("broken", "KeyError: 'gone' ({file}:{line} in broken)"),
    ],
)
async def test_what_is_neither_is_refused_at_the_start(file: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await scored(f"{file}:{name}", "7")
    line = 1 + PROGRAM.splitlines().index('    return {}["gone"]')
    assert message.format(file=file, line=line) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
)
def test_a_column_named_like_an_argument_is_refused_where_the_function_takes_it(name: str) -> None:
    takes_all, takes_one = (
        cloudpickle.dumps(each) for each in (lambda completions, **columns: 0, lambda completions: 0)
    )
    with pytest.raises(UsageError, match=f"the data has the columns {name}, but the run itself passes arguments"):
        load_functions([takes_all], [["answer", name]])
    assert len(load_functions([takes_all], [["answer"]])) == 1
    if name != "completions":
        assert len(load_functions([takes_one], [["answer", name]])) == 1
