"""tools/check_layers.py complains of each rule that a small package breaks, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"

CLEAN = {
    "asyncrl/__init__.py": "",
    "asyncrl/types.py": "class Noun: ...\n",
    "asyncrl/data/__init__.py": "",
    "asyncrl/data/rows/table.py": "from asyncrl.types import Noun\n\nfrom . import cell\n",
    "asyncrl/data/rows/cell.py": "import numpy\n",
    "asyncrl/data/packing.py": "from .rows.table import Noun\n",
    "asyncrl/runtime/runtime.py": "from asyncrl.data.packing import Noun\n",
    "tests/test_data.py": "from asyncrl.data import packing\n",
}


def complaints(root: Path, **files: str) -> list[str]:
    for name, text in {**CLEAN, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, str(TOOL), str(root)], capture_output=True, text=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert (done.returncode == 0) == lines[0].endswith("sizes are kept"), lines
    return lines if done.returncode else []


def test_a_clean_house_has_no_complaints(tmp_path: Path) -> None:
    assert complaints(tmp_path) == []


@pytest.mark.parametrize(
    "path, text, complaint",
    [
        ("asyncrl/data/up.py", "from asyncrl.pumps import train\n", "up.py:1: data (floor 4) imports pumps"),
        (
            "asyncrl/data/beside.py",
            "from ..models import policy\n",
            "beside.py:1: data imports models on its own floor",
        ),
        ("asyncrl/cellar/__init__.py", "", "'cellar' has no floor"),
        ("asyncrl/types.py", "import torch\n", "types.py:1: types imports torch"),
        ("asyncrl/data/long.py", "x = 1\n" * 601, "long.py: 601 lines; at most 600"),
        ("tests/test_long.py", "def f():\n" + "    x = 1\n" * 60, "test_long.py:1: f has 61 lines; at most 60"),
        ("asyncrl/data/behind.py", f"x = 1  # {'w' * 60}\n", "behind.py:1: a comment of 62 characters behind code"),
        ("asyncrl/data/empty.py", 'def f():\n    """As `g`."""\n', "empty.py:1: a docstring of 2 words"),
        (
            "asyncrl/data/twice.py",
            "class Noun: ...\n",
            "asyncrl/data/twice.py:1: class Noun stands in asyncrl/types.py:1",
        ),
        ("asyncrl/client/client.py", "x = 1\n" * 500, "client: 500 lines; its ceiling is"),
    ],
)
def test_floors_and_sizes(tmp_path: Path, path: str, text: str, complaint: str) -> None:
    [line] = complaints(tmp_path, **{path: text})
    assert complaint in line


@pytest.mark.parametrize(
    "importing",
    [
        "from .table import Noun\n",
        "import asyncrl.data.rows.table\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import table\n",
        "def late():\n    from asyncrl.data.rows import table\n",
        "try:\n    from .table import Noun\nexcept ImportError:\n    Noun = None\n",
    ],
)
def test_two_files_that_import_each_other(tmp_path: Path, importing: str) -> None:
    [line] = complaints(tmp_path, **{"asyncrl/data/rows/cell.py": importing})
    assert line.startswith("asyncrl/data/rows: a circle of imports: cell imports table (asyncrl/data/rows/cell.py:")
    assert "table imports cell (asyncrl/data/rows/table.py:3)" in line


def test_two_folders_that_reach_each_other_by_a_file_between_them(tmp_path: Path) -> None:
    [line] = complaints(
        tmp_path,
        **{
            "asyncrl/data/rows/late.py": "from ..columns import arrays\n",
            "asyncrl/data/columns/arrays.py": "from .. import packing\n",
        },
    )
    assert line.startswith("asyncrl/data: a circle of imports: columns imports packing")
    assert "packing imports rows" in line and "rows imports columns" in line


@pytest.mark.parametrize(
    "signature, counted",
    [
        ("a, b, c, d, e, f, g", None),
        ("a, b, c, d, e, f, g, h=1", "f has 8 arguments"),
        ("a, /, b, c, *, d, e, f, g, h", "f has 8 arguments"),
        ("self, a, b, c, d, e, f, g", None),
        ("a, b, c, d, e, f, g, *rest, h=1, **more", None),
        ("*, a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1", "f has 8 options"),
    ],
)
def test_at_most_seven_arguments(tmp_path: Path, signature: str, counted: str | None) -> None:
    found = complaints(tmp_path, **{"asyncrl/data/call.py": f"def f({signature}):\n    pass\n"})
    assert found == ([f"asyncrl/data/call.py:1: {counted}; at most 7"] if counted else [])


def test_a_constructor_may_have_more(tmp_path: Path) -> None:
    text = "class C:\n    def __init__(self, a, b, c, d, e, f, g, h):\n        pass\n"
    assert complaints(tmp_path, **{"asyncrl/data/call.py": text}) == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("asyncrl/data/curious.py", "from .rows.cell import _inside\n"),
        ("tests/test_curious.py", "def test():\n    from asyncrl.data.rows.cell import _inside as inside\n"),
        ("asyncrl/data/curious.py", "from .rows import cell\n\nprint(cell._inside)\n"),
    ],
)
def test_private_names_stay_where_they_are(tmp_path: Path, path: str, text: str) -> None:
    [line] = complaints(tmp_path, **{path: text})
    assert "_inside is private to" in line
