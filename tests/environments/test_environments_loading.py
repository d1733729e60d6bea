"""Environments by address, and the loading of user code by address in general."""

import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.imports import check_address, load_object, place_of, split_address
from asyncrl.environments.loading import load_environment, takes_policy
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError
from asyncrl.types import SamplingParams

FILE = Path(__file__).with_name("environments_user_code.py")
AGENTS = SimpleNamespace(chat=SimpleNamespace(tokenizer="a tokenizer"), sampling=SamplingParams(max_tokens=3), seed=5)
OFFERED = {"tokenizer": "a tokenizer", "sampling": AGENTS.sampling, "seed": 5, "text": "makes texts"}


def load(name):
    return load_environment(f"{FILE}:{name}", AGENTS, "makes texts")


def test_single_turn_has_a_short_name():
    assert isinstance(load_environment("single_turn", AGENTS, "makes texts"), SingleTurn)


def test_a_class_is_given_what_its_signature_takes():
    mine = load("Mine")
    assert (mine.tokenizer, mine.seed) == ("a tokenizer", 5)
    assert load("Everything").given == OFFERED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoRun", "no `async def run"),
        ("BlockingRun", "no `async def run"),
        ("Demanding", "requires 'api_key'"),
        ("plain_episode", "write `async def episode"),
        ("Broken", "raised OSError: no licence"),
        ("NOT_A_CLASS", "is of type int"),
        ("mine", "did you mean 'Mine'"),
        ("WITHOUT_SIGNATURE", "expected a coroutine function, a class or a factory, with a signature"),
    ],
)
def test_what_cannot_be_used_is_named(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(name)
    assert f"{FILE}:{name}" in str(caught.value)


def test_addresses():
    assert split_address("a/b.py:f") == ("a/b.py", "f")
    assert split_address("C:\\a\\b.py:f.g") == ("C:\\a\\b.py", "f.g")
    assert load_object("json:decoder.JSONDecoder") is load_object("json.decoder:JSONDecoder")
    for wrong in ("json", "json:", ":f", "json:a b", "json:a."):
        with pytest.raises(ConfigError, match="not an address"):
            load_object(wrong)


def test_a_file_is_loaded_once_by_whatever_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "once.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("once.py:A") is load_object(f"{file}:A") is load_object("./once.py:A")
    assert sys.path[-1] == str(tmp_path)


def test_two_files_of_one_name_are_two_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"WHERE = {folder!r}\n")
    assert [load_object(f"{tmp_path / folder / 'same.py'}:WHERE") for folder in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize("file", ["~no-such-user/x.py", "x" * 300 + ".py", "x\0.py"])
@pytest.mark.parametrize("call", [check_address, load_object])
def test_a_file_that_cannot_exist_is_named(file, call):
    with pytest.raises(ConfigError, match="there is no file"):
        call(f"{file}:f")


def test_the_name_of_a_file_may_have_dots(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number, name in enumerate(("reward.v2.py", "reward_v2.py")):
        (tmp_path / name).write_text(f"def f(): return {number}\n")
        check_address(f"{tmp_path}/{name}:f")
        assert load_object(f"{tmp_path}/{name}:f")() == number


def test_a_file_that_raises_is_named_and_can_be_loaded_once_it_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mended.py"
    file.write_text("raise SystemExit(2)\n")
    with pytest.raises(ConfigError, match=f"{file} raised SystemExit: 2") as caught:
        load_object(f"{file}:f")
    assert isinstance(caught.value.__cause__, SystemExit)
    file.write_text("f = 'mended now'\n")
    assert load_object(f"{file}:f") == "mended now"


WHOLE = """
import threading
from asyncrl.config.imports import load_object
found = []
other = threading.Thread(target=lambda: found.append(load_object(__file__ + ":Late")))
other.start()
other.join(0.2)  # it gets nothing before the end of this file, and waits
early = list(found)
class Late: ...
"""


def test_another_thread_gets_the_whole_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # what the other thread raises shows in `found`
    for name in ("whole_own_name", "whole-not-a-name"):
        file = tmp_path / f"{name}.py"
        file.write_text(WHOLE)
        late = load_object(f"{file}:Late")
        load_object(f"{file}:other").join()
        assert (load_object(f"{file}:early"), load_object(f"{file}:found")) == ([], [late])


def test_a_file_is_one_module_for_its_neighbours_and_none_where_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "state_of_all.py").write_text("SEEN = []\n")
    (tmp_path / "neighbour.py").write_text("from state_of_all import SEEN\n")
    assert load_object(f"{tmp_path}/neighbour.py:SEEN") is load_object(f"{tmp_path}/state_of_all.py:SEEN")
    (tmp_path / "json.py").write_text("OURS = True\n")  # a name that is taken: nobody else's module changes
    assert load_object(f"{tmp_path}/json.py:OURS") and not hasattr(sys.modules["json"], "OURS")
    (tmp_path / "half.py").write_text("FIRST = 1\nraise OSError\n")
    (tmp_path / "of-half.py").write_text("import half\n")
    for broken in ("half.py:FIRST", "of-half.py:FIRST"):
        before = set(sys.modules)
        with pytest.raises(ConfigError, match=f"raised OSError .{tmp_path}/half.py:2"):
            load_object(f"{tmp_path}/{broken}")
        assert set(sys.modules) == before


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "module_of_the_working_directory.py").write_text("f = 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("module_of_the_working_directory:f") == 1
    with pytest.raises(ConfigError, match=r"No module named 'nowhere_at_all'") as caught:
        load_object("nowhere_at_all.sub:f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_folder_beside_the_standard_library_is_the_users():
    file = f"{sysconfig.get_path('stdlib')}_tasks/rows.py"
    with pytest.raises(ValueError, match="no such row") as caught:
        exec(compile("raise ValueError('no such row')", file, "exec"))
    assert place_of(caught.value) == f" ({file}:1)"


def test_an_episode_may_have_positional_parameters():
    async def episode(task, policy, /):
        return 1.0

    async def sampled(prompt, /):
        return prompt

    assert takes_policy(episode) and not takes_policy(sampled)
