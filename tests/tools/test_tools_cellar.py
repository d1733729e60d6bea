"""tools/check_cellar.py finds what nothing reaches, follows what a run would, and lists options that nobody gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_cellar.py"
sys.path.insert(0, str(TOOL.parent))

HOUSE = {
    "asyncrl/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from asyncrl.runtime import Runtime as Runtime
__all__ = ["Runtime"]
""",
    "asyncrl/main.py": "from .runtime import Runtime\n\ndef main():\n    Runtime(1).run()\n",
    "asyncrl/runtime.py": """
class Runtime:
    def __init__(self, size, depth=1):
        self.size = size

    def run(self):
        from .rooms import open_rooms
        with open_rooms() as rooms:
            rooms.close()

    def submit(self, group): ...  # for users

    def _idle(self): ...
""",
    "asyncrl/rooms.py": '''
from importlib import import_module
from .stash import Stash, helper

def open_rooms():
    """Named nowhere: asyncrl.lost."""
    return Rooms(import_module("asyncrl.real").build())

class Rooms:
    def __init__(self, stash: Stash): ...
    def __enter__(self): ...
    def close(self): ...
    def statistics(self): ...

def unused():
    return helper()
''',
    "asyncrl/real.py": "from . import stash\n\ndef build():\n    return stash.Stash(3)\n\ndef other(): ...\n",
    "asyncrl/stash.py": "class Stash:\n    def __init__(self, most, clock=None, *, cap=0): ...\n\ndef helper(): ...\n",
    "asyncrl/lost.py": "def lost(): ...\n",
    "examples/loop.py": "from asyncrl import Runtime\n\nRuntime(1)._idle()\n",
    "tests/test_rooms.py": "from asyncrl.rooms import Rooms, unused\nRooms(1).statistics(); unused()\n",
}


def run(root: Path, *arguments: str, **files: str) -> list[str]:
    for name, text in {**HOUSE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, str(TOOL), "--root", str(root), *arguments], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.partition("nothing reaches ")[2].partition(";")[0] or line for line in lines]


def test_what_only_tests_reach_is_listed(tmp_path: Path) -> None:
    found = run(tmp_path, **{"asyncrl/real.py": HOUSE["asyncrl/real.py"].replace("\ndef other(): ...", "")})
    assert names(found) == ["this module", "Rooms.statistics", "unused", "helper"]
    assert found[0].startswith("asyncrl.lost: ")
    assert found[2].startswith("asyncrl/rooms.py:15: ") and found[2].endswith("(asyncrl.rooms:unused)")


@pytest.mark.parametrize(
    "change",
    [
        {"examples/more.py": "from asyncrl.rooms import unused\n\nunused()\n"},
        {"docs/page.md": "```python\nfrom asyncrl import rooms\n\nawait rooms.unused()\n```\n"},
        {"asyncrl/main.py": HOUSE["asyncrl/main.py"] + "    from asyncrl import rooms\n    getattr(rooms, name)()\n"},
        {"asyncrl/main.py": HOUSE["asyncrl/main.py"] + "    from .rooms import unused as used\n    later(used)\n"},
        {"asyncrl/rooms.py": HOUSE["asyncrl/rooms.py"].replace("def unused", "@registered\ndef unused")},
    ],
)
def test_programs_examples_and_indirect_names_reach(tmp_path: Path, change: dict[str, str]) -> None:
    assert {"unused", "helper"}.isdisjoint(names(run(tmp_path, **change)))


def test_attributes_reach_methods_of_reached_classes_only(tmp_path: Path) -> None:
    more = "class Far:\n    def close(self): ...\n\ndef far(x=Far): ...\n"
    assert "Far" in names(
        run(
            tmp_path,
            **{"asyncrl/lost.py": HOUSE["asyncrl/lost.py"], "asyncrl/stash.py": more + HOUSE["asyncrl/stash.py"]},
        )
    )
    text = HOUSE["asyncrl/main.py"] + "    other.statistics()\n"
    assert "Rooms.statistics" not in names(run(tmp_path, **{"asyncrl/main.py": text}))


def test_entries_that_are_not_needed_any_more(tmp_path: Path) -> None:
    run(tmp_path)
    from check_cellar import admit, cellar, follow, needless
    from house import python_files
    from reach import House

    house = House(python_files(tmp_path, "asyncrl"))
    reach = follow(house, tmp_path)
    allowed = {"asyncrl.lost": "", "asyncrl.rooms:unused": "", "asyncrl.stash:Stash": "", "asyncrl.rooms:gone": ""}
    assert [line.partition(";")[0] for line in needless(house, reach, allowed)] == [
        "asyncrl.stash:Stash: a run reaches it now",
        "asyncrl.rooms:gone: there is no such thing (any more)",
    ]
    for entry in ("asyncrl.lost", "asyncrl.rooms:unused"):
        admit(house, reach, entry)
    assert names(list(cellar(house, reach))) == ["other", "Rooms.statistics"]  # `helper` is used by an entry
