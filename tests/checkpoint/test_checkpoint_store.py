"""Checkpoints: whole or not there; what a full disk, a kill and a cancelled caller leave behind."""

import asyncio
import ctypes
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import orjson
import pytest
import torch
import warm

import asyncrl.checkpoint.atomic as atomic
from asyncrl.checkpoint.manifest import Comparison, compare
from asyncrl.checkpoint.shards import write_shard
from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import CheckpointError


class Own(dict[str, Any]):
    """A dictionary that `torch.load(weights_only=True)` refuses."""


def model_writer(text: str, size: int = 0) -> Any:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text(text)
        (directory / "weights.bin").write_bytes(b"w" * size)

    return write


def content(store: CheckpointStore, version: int) -> str:
    return (store.load(version).path / "config.json").read_text()


def names(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.directory.iterdir())


def test_an_empty_or_missing_directory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert (store.versions(), store.latest_version(), store.load_latest()) == ([], None, None)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step_3; versions found .*: none"):
        store.load(3)


def test_save_and_load(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "runs" / "checkpoints")
    trainer = {
        "moments": [torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16)],
        "step": 3,
        "rng": torch.get_rng_state(),
    }
    run = {"version": 3, "cursor": {"position": 9}, "untrained": [4, 7], "note": "ü", "lr": 1e-6}
    store.save(3, model_writer("a", 1000), state_writer(trainer=trainer, run=run))
    assert len([path for path in store.path(3).rglob("*") if path.is_file()]) == 5
    loaded = store.load_latest()
    assert loaded is not None and loaded.version == 3 and loaded.run == run
    back = loaded.trainer()
    assert torch.equal(back["moments"][0], torch.arange(4.0)) and back["moments"][1].dtype == torch.bfloat16
    assert back["step"] == 3 and torch.equal(back["rng"], trainer["rng"])  # type: ignore[arg-type]
    assert os.readlink(store.directory / "latest") == "step_3"
    assert (store.directory / "latest" / "config.json").read_text() == "a"


def test_retention_after_success_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version, kept in ((9, [9]), (10, [9, 10]), (11, [10, 11]), (100, [11, 100])):
        store.save(version, model_writer(str(version)))
        assert store.versions() == kept
    assert names(store) == ["latest", "step_100", "step_11"]
    everything = CheckpointStore(tmp_path / "all", keep=0)
    for version in range(5):
        everything.save(version, model_writer("x"))
    assert everything.versions() == [0, 1, 2, 3, 4]
    one = CheckpointStore(tmp_path / "one", keep=1)
    (one.path(1) / "mine").mkdir(parents=True)  # a model that somebody put beside the checkpoints, under such a name
    for version in (2, 3):
        one.save(version, model_writer(""))
    assert names(one) == ["latest", "step_1", "step_3"] and (one.path(1) / "mine").exists()


def test_versions_of_a_future_that_was_given_up_do_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    for version in (10, 11, 12):
        store.save(version, model_writer("old"))
    atomic.replace_link(tmp_path / "latest", "step_10", tmp_path / ".tmp-x")
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest_version() == 10
    store.save(11, model_writer("new"))
    assert store.versions() == [10, 11, 12] and store.latest_version() == 11 and content(store, 11) == "new"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_version_is_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(5, model_writer("a"), lambda directory: (directory / "extra").write_text("e") and None)
    store.save(5, model_writer("b"))
    assert names(store) == ["latest", "step_5"]
    assert content(store, 5) == "b" and not (store.path(5) / "extra").exists()


@pytest.mark.parametrize("exchange", [True, False])
def test_a_rename_that_fails_puts_the_old_one_back(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    store = CheckpointStore(tmp_path)
    store.save(5, model_writer("a"))
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if "tmp-step" in Path(source).name and (exchange or Path(target).name == "step_5"):
            raise OSError(5, "broken disk")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=r"could not rename into place .*step_5.*broken disk"):
        store.save(5, model_writer("b"))
    assert names(store) == ["latest", "step_5"] and content(store, 5) == "a"


def test_leftovers_of_killed_saves_are_ignored_then_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, model_writer("a"))
    (tmp_path / ".tmp-step_2-99-abc").mkdir()
    (tmp_path / ".tmp-step_2-99-abc" / "config.json").write_text("half")
    (tmp_path / ".tmp-latest-99-abc").symlink_to("step_2")
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_07").mkdir()
    assert store.versions() == [1] and store.latest_version() == 1
    store.save(3, model_writer("c"))
    assert names(store) == ["latest", "step_07", "step_1", "step_3", "step_x"]


def test_a_link_that_is_missing_or_names_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, model_writer("a"))
    store.save(2, model_writer("b"))
    (tmp_path / "latest").unlink()
    assert store.latest_version() == 2
    (tmp_path / "latest").symlink_to("step_9")
    loaded = store.load_latest()
    assert loaded is not None and loaded.version == 2 and loaded.run == {}


@pytest.mark.parametrize("name", ["weights.bin", "state/run.json", "state/trainer.pt", "state/manifest.json"])
def test_damage_is_named_with_the_way_out(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    for version in (1, 2):
        store.save(
            version, model_writer("a", 100), state_writer(trainer={"x": torch.ones(3)}, run={"version": version})
        )
    os.truncate(store.path(2) / name, 5)
    with pytest.raises(CheckpointError) as caught:
        store.load_latest()
    assert str(store.path(2)) in str(caught.value) and f"damaged: {name} " in str(caught.value)
    assert f"step_1 is intact: run `ln -sfn step_1 {tmp_path}/latest`" in str(caught.value)
    if name == "weights.bin":  # a copy of the directory followed the link
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").mkdir()
        told = store.resume_advice(1)
        assert told.startswith(
            f"step_1 is intact: remove the directory {tmp_path}/latest, which must be a link, run `ln -sfn"
        )
        (tmp_path / "latest").rmdir()
        (tmp_path / "latest").symlink_to("step_2")
    (store.path(2) / name).unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {name} is missing"):
        store.load_latest()
    assert store.load(1).run == {"version": 1}


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    """None of them makes a manifest of another kind of it, or one that says the same."""
    store = CheckpointStore(tmp_path)
    store.save(1, model_writer("a"))
    manifest = store.path(1) / "state/manifest.json"
    content = manifest.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(damaged)
        [fault] = compare(store.path(1)).faults
        assert fault.startswith("state/manifest.json is not what was written"), bit
    manifest.write_bytes(content[: content.index(b',\n  "sha256"')] + b"\n}")
    assert "did an older asyncrl write it" in compare(store.path(1)).faults[0]
    manifest.write_bytes(content)
    assert compare(store.path(1)) == Comparison(3, len(content) + 1, ())
    (store.path(1) / "notes.txt").write_text("the good one")
    store.load(1)  # files that were added are no damage


def test_a_file_that_is_hashed_while_it_is_written_is_not_read_again(tmp_path: Path) -> None:
    """What the writer said is what counts: damage between its write and the end of the save is damage."""

    def rots(directory: Path) -> None:
        content = bytearray((directory / "state/trainer.pt").read_bytes())
        content[100] ^= 1
        (directory / "state/trainer.pt").write_bytes(content)

    store = CheckpointStore(tmp_path)
    store.save(1, state_writer(trainer={"x": torch.ones(1000)}, run={}), rots)
    with pytest.raises(
        CheckpointError, match=r"state/trainer\.pt is not what was written .*no earlier checkpoint here is intact"
    ):
        store.load(1)


def test_a_writer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, model_writer("a"))

    def broken(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("shape mismatch")

    with pytest.raises(CheckpointError) as caught:
        store.save(2, broken)
    assert "could not write the checkpoint" in str(caught.value) and str(store.path(2)) in str(caught.value)
    assert "shape mismatch" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
    assert names(store) == ["latest", "step_1"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"could not create the checkpoint .*file/checkpoints/step_1"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, model_writer("a"))


def test_if_only_the_link_cannot_be_changed_the_error_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: str, link: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, model_writer("a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", full)
        with pytest.raises(
            CheckpointError, match=r"could not point .*; the latest checkpoint is step_1; step_2"
        ) as raised:
            store.save(2, model_writer("b"))
    [command] = re.findall(r"step_2 is intact: run `(.*)`, then resume=true continues from it", str(raised.value))
    assert store.latest_version() == 1 and content(store, 1) == "a"
    subprocess.run(shlex.split(command), check=True)
    assert store.latest_version() == 2 and content(store, 2) == "b"


@pytest.mark.parametrize(
    ("trainer", "entry"),
    [
        ({"a": {"b": [1, object()]}}, r"trainer\['a'\]\['b'\]\[1\] is builtins.object"),
        ({"rng": torch.Generator()}, r"trainer\['rng'\] is torch._C.Generator"),
        ({"x": torch.ones(2, device="meta")}, r"trainer\['x'\] is a tensor on meta"),
    ],
)
def test_state_that_would_need_code_to_load_is_refused_when_it_is_saved(
    tmp_path: Path, trainer: Any, entry: str
) -> None:
    with pytest.raises(CheckpointError, match=entry):
        CheckpointStore(tmp_path).save(1, state_writer(trainer=trainer, run={}))
    assert CheckpointStore(tmp_path).versions() == []


def test_what_may_be_saved_can_be_loaded(tmp_path: Path) -> None:
    trainer = {"b": b"\x00\xff", "t": (1, 2.5, None, True), 3: {"s": "ü"}, "e": [], "f64": torch.tensor(1.0).double()}
    store = CheckpointStore(tmp_path)
    store.save(1, state_writer(trainer=trainer, run={}))
    assert store.load(1).trainer() == trainer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(
            f"mounting needs privileges ({os.strerror(ctypes.get_errno())}); RLIMIT_FSIZE below covers the rest"
        )
    try:
        yield place
    finally:
        libc.umount2(os.fsencode(place), 2)


def torch_writer(directory: Path) -> None:
    state_writer(trainer={"x": torch.zeros(1_000_000)}, run={})(directory)


def safetensors_writer(directory: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1_000_000)}, directory / "model.safetensors")


@pytest.mark.parametrize("writer", [model_writer("b", 2_000_000), torch_writer, safetensors_writer])
def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path, writer: Any) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    store.save(1, model_writer("a", 400_000))
    for _ in range(3):
        with pytest.raises(CheckpointError) as caught:
            store.save(2, writer)
        text = str(caught.value)
        assert str(store.path(2)) in text and "the latest checkpoint is step_1" in text
        assert "No space left on device" in text and "MiB free on that disk)" in text
        assert names(store) == ["latest", "step_1"] and content(store, 1) == "a"
    store.save(3, model_writer("c", 400_000))
    assert names(store) == ["latest", "step_3"]


def test_a_file_size_limit_is_named(tmp_path: Path) -> None:
    """The same without privileges: the kernel refuses to write a file beyond RLIMIT_FSIZE."""
    program = f"""
        import resource, signal
        from pathlib import Path
        from asyncrl.checkpoint.store import CheckpointStore
        from asyncrl.errors import CheckpointError

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = CheckpointStore({str(tmp_path)!r}, keep=1)
        store.save(1, lambda d: (d / "w").write_bytes(b"x" * 10) and None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(2, lambda d: (d / "w").write_bytes(b"x" * 200_000) and None)
        except CheckpointError as error:
            print(error)
        print(store.load_latest().version)
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(program)], env=os.environ, timeout=60)
    message, version = done.stdout.strip().splitlines()
    assert "File too large" in message and "step_2" in message and version == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1"]


KILLED = """
    import os, sys, time
    from asyncrl.checkpoint import store as module

    stage, directory = sys.argv[1], sys.argv[2]
    store = module.CheckpointStore(directory, keep=1)

    def wait():
        print("here", flush=True)
        time.sleep(60)

    def after(name):
        real = getattr(module, name)
        def wrapped(*args):
            result = real(*args)
            wait()
            return result
        setattr(module, name, wrapped)

    def write(place):
        (place / "config.json").write_text("new")
        if stage == "write":
            wait()
        (place / "weights.bin").write_bytes(b"n" * 100)

    if stage != "write":
        after(stage)
    store.save(int(sys.argv[3]), write)
"""


@pytest.mark.parametrize(
    ("stage", "version", "found"),
    [
        ("write", 2, "old"),
        ("sync_tree", 2, "old"),
        ("replace_directory", 2, "old"),  # the link still names the earlier one
        ("replace_link", 2, "new"),
        ("replace_directory", 1, "new"),  # the same version again: exchanged in one call
        ("write", 1, "old"),
    ],
)
def test_kill_9_at_every_stage_leaves_a_whole_latest(tmp_path: Path, stage: str, version: int, found: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, model_writer("old", 100))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), stage, str(tmp_path), str(version)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    loaded = store.load_latest()
    assert loaded is not None and (loaded.path / "config.json").read_text() == found
    for whole in store.versions():
        store.load(whole)
    store.save(3, model_writer("next", 100))
    assert names(store)[:2] == ["latest", "step_3"] and not [n for n in names(store) if n.startswith(".tmp")]


class Slow:
    """A writer that begins, and waits until it may go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.go_on = anyio.Event(), threading.Event()
        self.loop, self.error = asyncio.get_running_loop(), error

    def __call__(self, directory: Path) -> None:
        self.loop.call_soon_threadsafe(self.entered.set)
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        (directory / "x").write_text("x")


@pytest.mark.parametrize("native", [True, False])
async def test_a_cancelled_caller_waits_for_the_write_and_the_loop_does_not(tmp_path: Path, native: bool) -> None:
    store, write, ended = CheckpointStore(tmp_path), Slow(), list[str]()
    before, scope = threading.active_count(), anyio.CancelScope()

    async def caller() -> None:
        with scope:
            try:
                await store.save_in_thread(1, write)
                await anyio.lowlevel.checkpoint()
            finally:
                ended.append(f"{type(sys.exc_info()[1]).__name__}, versions {store.versions()}")

    task = asyncio.ensure_future(caller())
    await write.entered.wait()  # the loop runs while the write is under way
    for _ in range(3):
        task.cancel() if native else scope.cancel()
        await asyncio.sleep(0)
    assert ended == []
    write.go_on.set()
    await asyncio.wait([task])
    assert ended == ["CancelledError, versions [1]"] and threading.active_count() == before


async def test_a_failed_write_is_heard_though_the_caller_was_cancelled(tmp_path: Path) -> None:
    store, write = CheckpointStore(tmp_path), Slow(OSError(28, "No space left on device"))
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(store.save_in_thread, 1, write)
            await write.entered.wait()
            group.cancel_scope.cancel()
            write.go_on.set()
    assert isinstance(caught.value.exceptions[0], CheckpointError) and names(store) == []


def test_saves_take_turns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    threads = [threading.Thread(target=store.save, args=(v, model_writer(str(v), 10_000))) for v in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.versions() == list(range(8)) and [content(store, v) for v in range(8)] == list("01234567")


def test_nothing_stays_open(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(0, model_writer("x"), torch_writer)
    before = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    for version in range(1, 6):
        store.save(version, model_writer("x"), torch_writer)
        store.load(version).trainer()
    assert before == (sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else [])


def test_a_real_model_loads_from_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    store = CheckpointStore(tmp_path)
    store.save(7, model.save_pretrained, state_writer(trainer={"step": 7}, run={"version": 7}))
    assert orjson.loads((store.path(7) / "state" / "manifest.json").read_bytes())["files"]["model.safetensors"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    for (name, ours), theirs in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_shard_of_an_earlier_attempt_takes_no_place_of_one_that_waits_to_be_moved(tmp_path: Path) -> None:
    # The second attempt resumed before version 40.
    for version in (40, 30, 31):
        write_shard(tmp_path, version, 1, {"weight": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_30-rank_1.pt", "step_31-rank_1.pt"]


@pytest.mark.parametrize("kind", [MappingProxyType, Own])
def test_a_mapping_that_would_not_be_read_again_is_refused(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"trainer\['state'\] is .*{kind.__name__}; pass only"):
        state_writer(trainer={"state": kind({})}, run={})(tmp_path)
