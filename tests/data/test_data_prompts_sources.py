"""`data.train` as users write it: what functions return, hub ids, and the errors of their own code in one line."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_sources import ITERATED_ROWS, load_rows
from asyncrl.data.tokenizing import encode_prompt
from asyncrl.errors import ConfigError, DataError

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(7)]
PROGRAM = """
import itertools
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)]
rows = ROWS
def a_list(): return ROWS
def generator(): yield from ROWS
def dataset():
    import datasets
    return datasets.Dataset.from_list(ROWS[::-1]).select(range(6, -1, -1))
def iterable_dataset(): return dataset().to_iterable_dataset()
def frame():
    import pandas
    return pandas.DataFrame(ROWS, index=range(7, 14))
def table():
    import pyarrow
    return pyarrow.Table.from_pylist(ROWS)
class Indexed:
    def __len__(self): return 7
    def __getitem__(self, index): return ROWS[index]
def endless():
    return ({"prompt": str(n)} for n in itertools.count())
def splits():
    import datasets
    return datasets.DatasetDict(train=dataset(), test=dataset())
def numbers(): return [{"prompt": "a"}, 3]
def nothing(): return None
async def waits(): return ROWS
def needs(size): return ROWS
def inner(row): return row["question"]
def broken(): return [{"prompt": inner(row)} for row in ROWS]
def broken_later():
    yield ROWS[0]
    raise ValueError("no more\\nrows")
def leaves(): raise SystemExit(3)
class Bad(Indexed):
    def __getitem__(self, index): return {"prompt": 1 // (3 - index)}
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), start=1) if text in line)


FORMS = ["rows", "a_list", "generator", "dataset", "iterable_dataset", "frame", "table", "Indexed"]


class Letters:
    """Token ids are code points."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture
def made(tmp_path: Path) -> str:
    (tmp_path / "made.py").write_text(PROGRAM)
    return f"{tmp_path}/made.py"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows_epochs_and_resume(made: str, form: str) -> None:
    def cursor() -> PromptSource:
        return PromptSource(load_rows(f"{made}:{form}"), Letters(), DataConfig(), seed=5)

    reference = PromptSource(ROWS, Letters(), DataConfig(), seed=5)
    expected = [(p.group_id, p.prompt, p.columns, p.epoch) for p in (reference.next() for _ in range(17)) if p]
    first = cursor()
    assert dict(load_rows(f"{made}:{form}")[3]) == ROWS[3]
    found = [first.next() for _ in range(10)]
    second = cursor()  # the function is called once more, as in a process that resumes
    second.load_state_dict(first.state_dict())
    found += [second.next() for _ in range(7)]
    assert [(p.group_id, p.prompt, p.columns, p.epoch) for p in found if p] == expected
    fourth = second.prompt_for(3)
    assert fourth is not None and fourth.prompt == expected[3][1]


def test_a_frame_loses_its_index_and_gives_missing_values_as_none() -> None:
    pandas = pytest.importorskip("pandas")
    rows = load_rows(pandas.DataFrame({"prompt": ["a", "b"], "x": [1.5, None], "m": [[{"role": "user"}], None]}))
    assert dict(rows[0]) == {"prompt": "a", "x": 1.5, "m": [{"role": "user"}]}
    assert dict(rows[1]) == {"prompt": "b", "x": None, "m": None}
    # Arrow has no type for these columns.
    rows = load_rows(
        pandas.DataFrame({"prompt": ["a", "b"], "x": [2**64, None], "y": [1, "z"], "m": [[1], None]}, dtype=object)
    )
    assert [dict(rows[i]) for i in (0, 1)] == [
        {"prompt": "a", "x": 2**64, "y": 1, "m": [1]},
        {"prompt": "b", "x": None, "y": "z", "m": None},
    ]
    with pytest.raises(DataError, match=r"several columns named 'x'"):
        load_rows(pandas.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]))


FAR = 10**12  # seconds: the year 33658, which no datetime of Python has


def test_columns_that_python_has_no_value_for_never_stop_a_run(tmp_path: Path) -> None:
    second, text = pa.timestamp("s"), f"{FAR} timestamp[s]"
    columns = {
        "far": (pa.array([FAR], second), text),
        "zone": (pa.array([0], pa.timestamp("us", tz="No/Where")), "0 timestamp[us, tz=No/Where]"),
        "long": (pa.array([2**62], pa.duration("s")), f"{2**62} duration[s]"),
        "day": (pa.array([2**30], pa.date32()), f"{2**30} date32[day]"),
        "deep": (pa.array([[{"a": FAR}, None]], pa.list_(pa.struct([("a", second)]))), [{"a": text}, None]),
        "coded": (pa.array([FAR], second).dictionary_encode(), text),
        "bytes": (pa.array([b"\xff"]).view(pa.string()), b"\xff"),
        "usual": (pa.array([0], second), datetime.datetime(1970, 1, 1)),
    }
    table = pa.table({"prompt": ["p"], **{name: array for name, (array, _) in columns.items()}})
    expected = {"prompt": "p", **{name: value for name, (_, value) in columns.items()}}
    assert dict(load_rows(table)[0]) == expected
    datasets = pytest.importorskip("datasets")
    stored = datasets.Dataset(table.select(["prompt", "far", "usual"]))
    assert dict(load_rows(stored)[0]) == {name: expected[name] for name in ("prompt", "far", "usual")}
    with pytest.raises(DataError, match="several columns named 'a'"):
        load_rows(pa.Table.from_arrays([pa.array(["p"]), pa.array([1]), pa.array([2])], names=["prompt", "a", "a"]))


@pytest.mark.parametrize("row", [{"prompt": "a\ud800"}, {"prompt": "a", "x": [{"\udfff": 1}]}])
def test_half_of_a_surrogate_pair_is_named_with_its_row(row: dict[str, Any]) -> None:
    source = PromptSource(load_rows([{"prompt": "whole"}, row]), None)
    with pytest.raises(DataError, match=r"row 2 holds .*half of a surrogate pair"):
        source.check_first_rows(9)
    with pytest.raises(DataError, match="half of a surrogate pair"):
        encode_prompt(row["prompt"], DataConfig(), None, row)


@pytest.mark.slow
def test_a_reasoning_gym_data_set() -> None:
    gym = pytest.importorskip("reasoning_gym")
    data = gym.create_dataset("leg_counting", size=5, seed=3)
    cursor = PromptSource(load_rows(data), Letters(), DataConfig(shuffle=False, max_prompt_tokens=4096))
    prompt = cursor.next()
    assert prompt is not None and prompt.prompt == data[0]["question"] and prompt.columns == data[0]
    assert len(cursor) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("endless", f"gave generator, which can only be iterated and has more than {ITERATED_ROWS:,} rows"),
        ("splits", "gave DatasetDict with train, test; expected rows: return one of its splits"),
        ("numbers", "row 2 of {file}:numbers is int; expected a mapping"),
        ("nothing", "gave NoneType; expected rows"),
        ("waits", "gave coroutine; expected rows"),
        ("needs", "{file}:needs raised TypeError: needs() missing 1 required positional argument: 'size'"),
        ("broken", f"{{file}}:broken raised KeyError: 'question' ({{file}}:{line_of('def inner')} in inner)"),
        ("broken_later", f"raised ValueError: no more rows ({{file}}:{line_of('raise ValueError')} in broken_later)"),
        ("leaves", f"{{file}}:leaves raised SystemExit: 3 ({{file}}:{line_of('def leaves')} in leaves)"),
    ],
)
def test_what_a_function_does_wrong_is_one_line(made: str, name: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(f"{made}:{name}")
    assert message.format(file=made) in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_that_cannot_be_made_is_named(made: str) -> None:
    rows = load_rows(f"{made}:Bad")
    assert dict(rows[0]) == {"prompt": 0}
    with pytest.raises(
        DataError, match=r"^row 4 of .*made\.py:Bad raised ZeroDivisionError: .*made\.py:\d+ in __getitem__"
    ):
        rows[3]


def test_an_import_that_raises_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "early.py"
    for text, message in [
        ("import json\n\njson.loads('{')\n", f"{file} raised JSONDecodeError: .*\\({file}:3\\)$"),
        ("def rows(:\n", f"{file} raised SyntaxError: .*\\({file}:1\\)$"),
        ("def rows(): ...\n", "has no 'row'; did you mean 'rows'"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_rows(f"{file}:row")
        assert "\n" not in str(caught.value)
        sys.modules.pop("early", None)


def test_paths_with_colons_lists_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "odd:name.parquet")
    for source in (ROWS, tmp_path / "odd:name.parquet", f"{tmp_path}/odd:name.parquet"):
        assert len(load_rows(source)) == 7
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for missing in ("train/gone.jsonl", "data/gone", "gone", "./gone", "a/b/c"):  # none is looked for on the hub
        with pytest.raises(DataError, match=rf"file {Path(missing)} does not exist \(looked from"):
            load_rows(missing)
    (tmp_path / "x.yaml").write_text(f"data: {{train: {'x' * 300}}}\n")
    for too_long in (load_config([tmp_path / "x.yaml"]).data.train, f"{'x' * 300}/y.jsonl"):
        with pytest.raises(DataError, match=r"cannot be read: .* File name too long"):
            load_rows(too_long)


def test_shards_beside_the_yaml_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data/train-00000-of-00001.parquet")
    (tmp_path / "x.yaml").write_text("data: {train: data/train}\n")
    monkeypatch.chdir("/")
    assert len(load_rows(load_config([tmp_path / "x.yaml"]).data.train)) == 7


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a machine without network whose cache holds the data set `org/sums` (train, test)."""
    datasets = pytest.importorskip("datasets")
    files = {}
    for split, part in (("train", ROWS[:5]), ("test", ROWS[5:])):
        files[split] = str(tmp_path / f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(part), files[split])
    cache = tmp_path / "cache"
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache))
    [made] = (cache / "parquet").iterdir()
    (cache / "org___sums").mkdir()
    made.rename(cache / "org___sums" / "default")
    for file in cache.rglob("parquet-*.arrow"):
        file.rename(file.with_name(file.name.replace("parquet", "sums")))
    yield {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache), "HF_HOME": str(tmp_path / "home")}


def test_hub_ids_out_of_the_cache_and_without_a_hub(hub: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import sys; from asyncrl.data.prompts_sources import load_rows\n"
        "for name in sys.argv[1:]:\n"
        "    try: rows = load_rows(name); print(len(rows), rows[0]['prompt'])\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    names = ["org/sums:train", "org/sums:default:test", "org/sums", "org/gone:train"]
    done = subprocess.run(
        [sys.executable, "-c", program, *names], env=hub, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["5 0+1=", "2 5+1="]
    assert lines[2] == "DataError org/sums has several splits (train, test); name one of them, like org/sums:train"
    assert lines[3].startswith(f"DataError there is no file or directory org/gone (looked from {tmp_path}), and as a ")
    assert "'org/gone:train' cannot be loaded: ConnectionError: " in lines[3] and len(lines) == 4
