"""The cursor over the prompts: stream, ranks, lengths, and going on after a resume."""

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import REROLLS, EpochOrder, PromptSource
from asyncrl.errors import DataError


class Characters:
    """A tokenizer of the Hugging Face form: one id per character, no chat template."""

    chat_template: Any = None

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is no template")

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.encoded.append(text)
        return [ord(c) for c in text]


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": "p" * (index % 5 + 1), "answer": index} for index in range(count)]


def source(count: int = 10, config: DataConfig | None = None, **rest: Any) -> PromptSource:
    return PromptSource(rows_of(count), Characters(), config, **rest)


def answers(cursor: PromptSource, count: int) -> list[int]:
    return [prompt.columns["answer"] for _ in range(count) if (prompt := cursor.next()) is not None]


@given(st.integers(1, 300), st.integers(0, 2**70), st.integers(0, 50))
def test_an_epoch_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    order = EpochOrder(rows, seed, epoch)
    assert sorted(order[position] for position in range(rows)) == list(range(rows))


def test_the_order_is_pinned() -> None:
    """A resumed run must find the same rows whatever library versions it finds."""
    order = EpochOrder(10, seed=3, epoch=1)
    assert [order[p] for p in range(10)] == [8, 5, 6, 1, 3, 9, 0, 7, 2, 4]


def test_the_order_is_even() -> None:
    """Every row comes at every position equally often: chi-square of 7 x 7 cells, 36 degrees of freedom, p > 0.001."""
    seen = Counter((p, EpochOrder(7, seed, 0)[p]) for seed in range(1400) for p in range(7))
    chi = sum((seen[p, row] - 200) ** 2 / 200 for p in range(7) for row in range(7))
    assert chi < 68
    follows = Counter(EpochOrder(50, seed, 2)[1] - EpochOrder(50, seed, 2)[0] == 1 for seed in range(1000))
    assert follows[True] < 45  # expected 20


def test_group_ids_epochs_and_columns() -> None:
    cursor = source(3, DataConfig(shuffle=False))
    prompts = [cursor.next() for _ in range(7)]
    assert [(p.group_id, p.epoch, p.columns["answer"]) for p in prompts if p] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2), (6, 2, 0),
    ]  # fmt: skip
    assert prompts[1] is not None and prompts[1].ids.tolist() == [112, 112] and prompts[1].prompt == "pp"
    assert "prompt" not in prompts[1].columns and prompts[1].ids.dtype == "int32"


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_ranks_share_the_stream(rows: int, world_size: int, seed: int, shuffle: bool) -> None:
    config = DataConfig(shuffle=shuffle)
    whole = source(rows, config, seed=seed, max_epochs=3)
    expected = {p.group_id: p.columns["answer"] for p in iter(whole.next, None)}
    got: dict[int, int] = {}
    for rank in range(world_size):
        cursor = source(rows, config, seed=seed, max_epochs=3, rank=rank, world_size=world_size)
        mine = {p.group_id: p.columns["answer"] for p in iter(cursor.next, None)}
        assert not mine.keys() & got.keys() and cursor.next() is None
        got |= mine
    assert got == expected and len(got) == 3 * rows


@pytest.mark.parametrize(("epochs", "prompts"), [(1, 30), (0.1, 3), (0.5, 15), (1.01, 31), (0.001, 1)])
def test_max_epochs(epochs: float, prompts: int) -> None:
    cursor = source(30, max_epochs=epochs)
    assert len(answers(cursor, 100)) == prompts and cursor.next() is None


def test_epochs_seeds_and_prompts_that_come_back_after_the_last() -> None:
    cursor = source(10, seed=1, max_epochs=2)
    first, second = answers(cursor, 10), answers(cursor, 10)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert answers(source(10, seed=1), 10) == first != answers(source(10, seed=2), 10)
    assert cursor.next() is None
    cursor.requeue([1])
    assert answers(cursor, 9) == [first[1]]


def test_prompt_for_any_group_id() -> None:
    cursor = source(10, seed=4)
    delivered = [cursor.next() for _ in range(25)]
    for prompt in delivered:
        assert prompt is not None
        again = source(10, seed=4).prompt_for(prompt.group_id)
        assert again is not None
        assert (again.columns, again.ids.tolist(), again.epoch) == (prompt.columns, prompt.ids.tolist(), prompt.epoch)


def test_overlong_refused_with_its_row_before_or_during_the_run() -> None:
    config = DataConfig(max_prompt_tokens=4, shuffle=False)
    cursor = source(10, config)
    assert answers(cursor, 4) == [0, 1, 2, 3]
    with pytest.raises(
        DataError, match=r"the list of rows row 5: the prompt has 5 tokens; data\.max_prompt_tokens is 4"
    ):
        cursor.next()
    with pytest.raises(DataError, match="row 5"):
        source(10, config).check_all()


def test_overlong_cut_at_the_beginning_and_counted() -> None:
    rows = [{"prompt": "abcdef"}, {"prompt": "xy"}]
    cursor = PromptSource(rows, Characters(), DataConfig(max_prompt_tokens=3, overlong="cut", shuffle=False))
    prompts = [cursor.next() for _ in range(4)]
    assert ["".join(map(chr, p.ids)) for p in prompts if p] == ["def", "xy", "def", "xy"]
    assert cursor.statistics()["cut"] == 2 and cursor.statistics()["delivered"] == 4
    cursor.prompt_for(0)
    assert cursor.statistics()["cut"] == 2


def test_overlong_skipped_rows_keep_their_ordinals() -> None:
    config = DataConfig(max_prompt_tokens=4, overlong="skip", shuffle=False)
    cursor = source(10, config, max_epochs=2)
    prompts = list(iter(cursor.next, None))
    assert [p.group_id for p in prompts] == [g for g in range(20) if g % 5 != 4]
    assert cursor.statistics()["skipped"] == 4 and cursor.statistics()["delivered"] == 16
    assert cursor.prompt_for(4) is None
    cursor.requeue([3, 4, 5])  # who was cut off from a cursor knows which ones it passed, not which of them it skipped
    assert [p.group_id for p in iter(cursor.next, None)] == [3, 5]


def test_a_file_of_overlong_rows_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(DataError, match="every prompt"):
        PromptSource([{"prompt": "abc"}] * 3, Characters(), DataConfig(max_prompt_tokens=2, overlong="skip")).next()


def test_one_short_row_is_found_wherever_the_epochs_place_it() -> None:
    config = DataConfig(max_prompt_tokens=2, overlong="skip")
    for seed in range(10):
        cursor = PromptSource(
            [{"prompt": "abc"}] * 4 + [{"prompt": "a"}], Characters(), config, seed=seed, max_epochs=5
        )
        assert len(list(iter(cursor.next, None))) == 5


def test_lazily_one_row_at_a_time_and_once() -> None:
    tokenizer = Characters()
    cursor = PromptSource(rows_of(100), tokenizer)
    assert tokenizer.encoded == []
    cursor.next()
    del tokenizer.encoded[1:]  # what the tokenizer puts around a text is asked once
    answers(cursor, 250)
    assert len(tokenizer.encoded) == 100


def test_rows_beyond_the_cache_are_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.data.prompts._CACHED_TOKENS", 4)
    cursor = PromptSource([{"prompt": "abc"}, {"prompt": "def"}], Characters(), DataConfig(shuffle=False))
    assert ["".join(map(chr, p.ids)) for _ in range(4) if (p := cursor.next())] == ["abc", "def"] * 2


@pytest.mark.parametrize("prompt", ["", [], None, 3, [{"role": "user"}], ["hi"], [{"content": "x"}]])
def test_an_unusable_prompt_names_its_row(prompt: Any) -> None:
    cursor = PromptSource([{"prompt": "a"}, {"prompt": prompt}], Characters(), DataConfig(shuffle=False))
    cursor.next()
    with pytest.raises(DataError, match="row 2: "):
        cursor.next()


def test_a_missing_column_names_the_columns_found() -> None:
    with pytest.raises(
        DataError, match=r"row 1 has no column 'prompt'; found question, answer; set data\.prompt_column"
    ):
        PromptSource([{"question": "a", "answer": "b"}], Characters())
    config = DataConfig(prompt_column="question")
    prompt = PromptSource([{"question": "a", "answer": "b"}], Characters(), config).next()
    assert prompt is not None and prompt.columns == {"answer": "b"}


def test_rows_of_agents_need_no_prompt() -> None:
    rows = [{"question": "a"}, {"prompt": "b"}, {"prompt": None, "question": "c"}]
    cursor = PromptSource(rows, Characters(), DataConfig(shuffle=False), for_agents=True, max_epochs=1)
    cursor.check_first_rows(3)
    cursor.check_all()
    assert cursor.longest()[0] >= 1
    prompts = [cursor.next() for _ in rows]
    assert [prompt and (prompt.prompt, dict(prompt.columns)) for prompt in prompts] == [
        ("", {"question": "a"}), ("b", {}), ("", {"question": "c"})
    ]  # fmt: skip
    assert [prompt and prompt.ids.size > 0 for prompt in prompts] == [False, True, False]
    # Other rows are another data set, although they have no prompts to compare.
    other = PromptSource([{"question": "x"}, *rows[1:]], Characters(), for_agents=True)
    assert other.digest != PromptSource(rows, Characters(), for_agents=True).digest
    with pytest.raises(DataError, match=r"row 2 has no column 'prompt'.* rollout.environment to an agent"):
        PromptSource([{"prompt": "a"}, {"question": "b"}], Characters()).check_all()


def test_no_rows() -> None:
    with pytest.raises(DataError, match="holds no rows"):
        PromptSource([], Characters())


@given(
    st.integers(1, 9), st.integers(0, 40), st.sets(st.integers(0, 39)), st.integers(1, 3), st.booleans(), st.data()
)  # fmt: skip
def test_resume_skips_and_repeats_nothing(
    rows: int, taken: int, lost: set[int], world_size: int, saved_again: bool, data: Any
) -> None:
    """What was trained before the checkpoint and what comes after it are the uninterrupted stream, each group once."""
    rank = data.draw(st.integers(0, world_size - 1))
    place = {"seed": 5, "rank": rank, "world_size": world_size}
    uninterrupted = source(rows, **place)
    expected = {p.group_id: p.columns["answer"] for _ in range(taken + 10) if (p := uninterrupted.next())}
    before = source(rows, **place)
    handed = [p for _ in range(taken) if (p := before.next())]
    untrained = [p.group_id for i, p in enumerate(handed) if i in lost]
    saved = orjson.loads(orjson.dumps(before.state_dict()))
    after = source(rows, **place)
    after.load_state_dict(saved)
    after.requeue(reversed(untrained))
    after.requeue(untrained)
    assert after.statistics()["waiting"] == len(untrained)
    if saved_again:
        saved = orjson.loads(orjson.dumps(after.state_dict()))
        after = source(rows, **place)
        after.load_state_dict(saved)
    came = [p for _ in range(len(untrained) + 10) if (p := after.next())]
    assert [p.group_id for p in came] == untrained + sorted(expected)[taken:]
    trained = [p for p in handed if p.group_id not in untrained]
    assert {p.group_id: p.columns["answer"] for p in trained + came} == expected
    assert after.statistics()["redelivered"] == len(untrained)


def test_only_what_was_handed_out_can_be_given_back() -> None:
    cursor = source(10)
    cursor.next()
    with pytest.raises(DataError, match="group id 1 was never handed out by rank 0 of 1; the next new group id is 1"):
        cursor.requeue([0, 1])
    assert cursor.statistics()["waiting"] == 0
    with pytest.raises(DataError, match="never handed out"):
        cursor.requeue([-1])
    second = source(10, rank=1, world_size=2)
    assert answers(second, 3) and second.statistics()["position"] == 7
    # 2 and a replay of it are of rank 0.
    for foreign in (2, 2 + REROLLS):
        with pytest.raises(DataError, match=f"group id {foreign} was never handed out by rank 1 of 2"):
            second.requeue([1, foreign])
    second.requeue([1, 3 + REROLLS])
    assert second.statistics()["waiting"] == 2


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (lambda: source(11), "number of rows"),
        (lambda: PromptSource([*rows_of(9), {"prompt": "other", "answer": 9}], Characters()), "fingerprint"),
        (lambda: source(seed=1), "seed"),
        (lambda: source(config=DataConfig(shuffle=False)), "shuffle"),
        (lambda: source(world_size=2), "number of ranks"),
        (lambda: source(rank=1, world_size=2), "rank"),
    ],
)
def test_state_of_other_data_is_refused(other: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        other().load_state_dict(source().state_dict())
