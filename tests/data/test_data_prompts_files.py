"""Reading rows from JSONL, CSV, parquet and saved `datasets` directories."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data.prompts_files import is_local, open_rows
from asyncrl.errors import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "info": {"kind": "sum"}},
    {"prompt": "2+2=", "answer": "4", "info": {"kind": "sum"}},
    {"prompt": "ü?", "answer": None, "info": {"kind": "odd"}},
]


def test_jsonl_parquet_and_datasets_give_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import orjson

    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n\r\n".join(orjson.dumps(row) for row in ROWS) + b"\n")
    (tmp_path / "a.json").write_bytes(orjson.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    for name in ("a.jsonl", "a.json", "a.parquet", "saved"):
        rows = open_rows(tmp_path / name)
        assert [dict(rows[index]) for index in range(len(rows))] == ROWS, name


def test_a_csv_value_may_be_long(tmp_path: Path) -> None:
    text = "x" * 200_000
    (tmp_path / "a.csv").write_text(f"prompt\n{text}\n")
    assert dict(open_rows(tmp_path / "a.csv")[0]) == {"prompt": text}


def test_csv_values_are_strings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"1,\n""x""",007\r\n\r\n2+2=,\r\n')
    rows = open_rows(tmp_path / "a.csv")
    assert [dict(rows[i]) for i in range(len(rows))] == [
        {"prompt": '1,\n"x"', "answer": "007"},
        {"prompt": "2+2=", "answer": ""},
    ]


def test_a_directory_of_parquet_files(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"part-{number}.parquet")
    rows = open_rows(tmp_path)
    assert [dict(rows[i]) for i in range(len(rows))] == ROWS
    pq.write_table(pa.Table.from_pylist([{"prompt": 3}]), tmp_path / "part-9.parquet")
    with pytest.raises(DataError, match="do not have the same columns"):
        open_rows(tmp_path)


def test_splits_beside_each_other_are_never_one_data_set(tmp_path: Path) -> None:
    """The layout of a data set of the hub, and verl's: what is held out must not be trained on."""
    hub, verl = tmp_path / "hub", tmp_path / "verl"
    hub.mkdir(), verl.mkdir()
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        pq.write_table(pa.Table.from_pylist([ROWS[number]]), hub / f"{name}.parquet")
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(ROWS), verl / f"{name}.parquet")
    for place in (hub, verl):
        with pytest.raises(DataError, match=r"files of several splits .*test.*train"):
            open_rows(place)
    rows = open_rows(hub / "train")
    assert [dict(rows[i]) for i in range(len(rows))] == ROWS[:2] and len(open_rows(hub / "test")) == 1


def test_a_filtered_and_reordered_datasets_directory(tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_list(ROWS).select([2, 0])
    made.save_to_disk(tmp_path / "picked")
    rows = open_rows(tmp_path / "picked")
    assert [rows[index]["prompt"] for index in range(len(rows))] == ["ü?", "1+1="]


def test_several_splits_are_named(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"several splits \(test, train\); name one of them"):
        open_rows(tmp_path / "both")
    assert len(open_rows(tmp_path / "both" / "test")) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', "line 3 is not valid JSON"),
        ("x.jsonl", b'{"prompt": "a"}\n[1]\n', "line 2 holds list"),
        ("x.json", b'[{"prompt": "a"}, 3]', "row 2 holds int"),
        ("x.json", b"[", "not valid JSON"),
        ("x.jsonl", b'{"prompt": "a", "x": NaN}', "line 1 is not valid JSON: NaN is not a finite number; write null"),
        ("x.jsonl", b'{"prompt": "a", "x": 1e400}', "1e400 is not a finite number"),
        ("x.jsonl", b'{"prompt": "a", "i": {"x": 1, "x": 2}}', "the key 'x' is twice in one object"),
        (
            "x.jsonl",
            b'{"prompt": "a"}\n{"prompt": "a", "x": ["\\ud800"]}',
            "line 2 holds '\\ud800', half of a surrogate pair",
        ),
        ("x.jsonl", b'{"prompt": "a", "x": ' + 5000 * b"1" + b"}", "line 1 is not valid JSON: Exceeds the limit"),
        ("x.csv", b"prompt,a,b,a\n1,2,3,4\n", "has several columns named 'a'"),
        ("x.parquet", b"no parquet", "not a readable parquet"),
        ("x.txt", b"prompt\na\n", "has the ending '.txt'; expected one of .jsonl, .json, .ndjson, .csv, .parquet"),
        ("x.csv", b"prompt,answer\n1,2,3\n", "line 2 has 3 values; the first line names 2 columns (prompt, answer)"),
        ("x.csv", b'prompt,answer\n"1,2\n', "is not valid CSV in UTF-8 (line"),
        ("x.csv", b"prompt,answer\n\xff,2\n", "is not valid CSV in UTF-8 (line"),
        ("d/state.json", b"{", "not a readable datasets directory"),
        ("d/state.json", b'{"_data_files": [{"filename": "gone.arrow"}]}', "cannot be read"),
        ("d/other", b"", "without parquet files and without state.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    place = path.parent if "/" in name else path
    with pytest.raises(DataError) as caught:
        open_rows(place)
    assert message in str(caught.value) and str(place) in str(caught.value)


def test_integers_of_any_size_byte_order_marks_and_pairs_of_surrogates(tmp_path: Path) -> None:
    wide = {"prompt": "\U0001f600", "n": 2**64, "m": [-(2**200)], "s": "18446744073709551617"}
    for name, text in (("a.jsonl", "\r\n \n%s\r\n\r\n"), ("a.json", "[\n%s\n]")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (text % json.dumps(wide)).encode())
        rows = open_rows(tmp_path / name)
        assert [dict(rows[i]) for i in range(len(rows))] == [wide]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], None),
        (["train-00000-of-00001-0a1b2c"], None),
        (["train-00000-of-00003", "train-00002-of-00003"], r"train lacks 1 of the 3 files train-NUMBER-of-3: 1;"),
        (["train-00001-of-00001"], r"lacks 1 of the 1 files train-NUMBER-of-1: 0;"),
        (
            ["train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"],
            r"several shardings of 'train' \(-of-1, -of-2;",
        ),
        (["train-00000-of-00001-0a", "train-00000-of-00001-0b"], r"several shardings of 'train'"),
    ],
)
def test_the_shards_of_a_name_are_all_of_one_sharding(tmp_path: Path, names: list[str], message: str | None) -> None:
    for number, name in enumerate(names):
        pq.write_table(pa.Table.from_pylist([ROWS[number]]), tmp_path / f"{name}.parquet")
    for place in (tmp_path / "train", tmp_path):
        if message is None:
            assert len(open_rows(place)) == len(names)
        else:
            with pytest.raises(DataError, match=message.removeprefix("train ")):
                open_rows(place)
    if message is None:
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train-hard-00000-of-00001.parquet")
        assert len(open_rows(tmp_path / "train")) == len(names)


def test_a_missing_file_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist .* \.jsonl, .* \.csv, \.parquet file, a directory of parquet"):
        open_rows(tmp_path / "gone.jsonl")


def test_a_file_that_cannot_exist_is_named() -> None:
    for name in ("~no-such-user/x.jsonl", "x" * 300 + ".jsonl", "x\0.jsonl"):
        assert not is_local(name)
        with pytest.raises(DataError, match=r"x\W?.jsonl (does not exist|cannot be read)"):
            open_rows(name)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "dir.jsonl")
    (tmp_path / "dir.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(DataError, match="loop"):
        open_rows(tmp_path / "loop.jsonl")


def test_the_digest_of_rows_with_sets_is_that_of_every_process() -> None:
    """Other rows keep the digest of `repr`, which checkpoints have."""
    program = (
        "from asyncrl.data.prompts_files import *; tags = {'a', 'b', 'c', frozenset('xyz')}\n"
        "print(digest(ListRows([{'q': [(tags, 1)]}]), 'prompt'), digest(ListRows([{'prompt': 'a'}]), 'prompt'))\n"
        "print(digest(ListRows([{'q': [{'n': {8, 1, 10}}, ({'t': 1},)], 'x': None}]), 'prompt'))"
    )
    seen = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    plain = [
        zlib.crc32(repr(each).encode(), zlib.crc32(b"1"))
        for each in ("a", {"q": [{"n": {8, 1, 10}}, ({"t": 1},)], "x": None})
    ]
    assert len(seen) == 1 and list(map(int, seen.pop().split()))[1:] == plain


def test_no_torch_at_import_time() -> None:
    program = (
        "import sys, asyncrl.data.prompts; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pyarrow', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
