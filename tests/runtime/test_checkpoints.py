"""Checkpoints of runs: when they are written, damaged ones, ones that cannot be written, and what the last one needs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import resource
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from runtime_helpers import DRY, MODEL, REAL, ROOT, config_of, metrics_of, run_ranks, train, weights_of, write_yaml
from runtime_model import build
from transformers import GenerationConfig

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.cli.app import main as command_line
from asyncrl.concurrency.offload import offload
from asyncrl.config.load import load_config
from asyncrl.environments.single_turn import episode_seed
from asyncrl.errors import CheckpointError, ConfigError, DivergenceError, LifecycleError, PlatformError
from asyncrl.main import main, report_errors
from asyncrl.models.loading import require_ids_fit, require_saveable
from asyncrl.pumps.evaluate import Evaluations
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.opened import OpenRun
from asyncrl.runtime.runtime import Runtime
from asyncrl.training.snapshot import non_finite_tensor

QUICK = REAL | {"train": REAL["train"] | {"max_steps": 30}, "checkpoint": {"keep": 0}}


def versions(run: Path) -> list[int]:
    return CheckpointStore(run / "checkpoints").versions()


async def test_checkpoints_are_written_by_time_where_no_interval_is_given(tmp_path: Path) -> None:
    assert config_of(tmp_path).checkpoint.every_s == 600  # without being asked
    for name, settings in {
        "often": ["checkpoint.every_s=0.01"],
        "interval": ["checkpoint.every_s=0.01", "checkpoint.every=5"],
        "never": ["checkpoint.every_s=null"],
    }.items():
        settings += [f"run.name={name}", "train.max_steps=6"]
        await train(tmp_path, *settings, base=QUICK)
    often = versions(tmp_path / "runs/often")
    assert len(often) > 1 and often[-1] == 6
    assert versions(tmp_path / "runs/interval") == [5, 6]
    assert versions(tmp_path / "runs/never") == [6]


async def test_training_goes_on_while_a_checkpoint_is_written(here: Path) -> None:
    """The tokenizer of this model is written only once a later step has its line of metrics."""
    settings = [f"model.path={MODEL}:build_patient", "checkpoint.every=4", "train.max_steps=7"]
    await train(here, *settings, base=QUICK)
    assert versions(here / "runs/run") == [4, 7]
    assert (here / "waited").read_text() == "saw step 6"


@pytest.mark.slow
def test_two_ranks_agree_on_the_time(tmp_path: Path) -> None:
    """Each has to bring its part (of the model, of its replay buffer), or the first one would wait for it."""
    tree = QUICK | {"distributed": {"sharding": "fsdp"}, "replay": {"size": 4}}
    tree |= {"checkpoint": {"keep": 0, "every_s": 0.01}, "train": QUICK["train"] | {"max_steps": 4}}
    run_ranks(tmp_path, tree)
    run = tmp_path / "runs/run"
    assert len(versions(run)) > 1 and versions(run)[-1] == 4
    run_ranks(tmp_path, tree | {"resume": True, "train": QUICK["train"] | {"max_steps": 6}})
    assert [line["step"] for line in metrics_of(run)] == list(range(1, 7))


def test_a_run_in_which_no_thread_can_be_started_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first step on, to its end. One that gets none at its start says so in a sentence."""
    monkeypatch.chdir(tmp_path)
    refused = False

    def start(thread: threading.Thread, begin: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
        if refused:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def at_a_step(run: OpenRun, report: StepReport, on: Callable[..., None] = OpenRun._on_step) -> None:
        nonlocal refused
        refused = True
        on(run, report)

    monkeypatch.setattr(OpenRun, "_on_step", at_a_step)
    file = str(write_yaml(tmp_path, REAL))
    assert main([file, "train.max_steps=3", "checkpoint.every=2"]) == 0
    assert versions(tmp_path / "runs/run") == [2, 3] and (tmp_path / "runs/run/report.html").exists()
    capsys.readouterr()
    assert main([file, "run.name=two"]) == 2
    assert capsys.readouterr().err.startswith(
        "asyncrl: PlatformError: can't start new thread: no more threads or processes"
    )


def test_a_run_that_diverges_leaves_the_last_good_version(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 1e38 is too large for float32. What is there already stays, and is named."""
    file = str(write_yaml(here, REAL))
    assert main([file, "train.lr=1e38"]) == 3
    error = capsys.readouterr().err
    assert "version 1 has weights that are NaN or infinite" in error and "lower train.lr" in error
    assert "packed copy" not in error and "no version was saved" in error
    assert versions(here / "runs/run") == []
    assert main([file, "run.name=two", "train.max_steps=2"]) == 0
    assert main([file, "run.name=two", "resume=true", "train.lr=1e38", "checkpoint.every=1"]) == 3
    error = capsys.readouterr().err
    assert "the newest saved version without NaN or infinite values is 2: runs/two/checkpoints/step_2" in error
    assert versions(here / "runs/two") == [2]
    assert (here / "runs/two/checkpoints/latest").resolve().name == "step_2"
    assert non_finite_tensor(weights_of(here / "runs/two", 2)) is None


@pytest.mark.parametrize(
    ("lr", "words"),
    [
        ("3e37", "version 2 has weights that are NaN or infinite, or beyond 1e+18"),  # packed copies of these differ
        ("1e22", "version 2 has weights that are NaN or infinite, or beyond 1e+18"),  # their gradient is NaN
        ("1e15", "the model's logits are not finite in"),  # the engine finds that
    ],
)
def test_finite_weights_that_nothing_can_be_computed_with_are_not_saved(
    here: Path, capsys: pytest.CaptureFixture[str], lr: str, words: str
) -> None:
    file = str(write_yaml(here, REAL | {"preset": "sync"}))
    assert main([file, "train.max_steps=1"]) == 0
    assert main([file, "resume=true", f"train.lr={lr}"]) == 3
    error = capsys.readouterr().err
    assert words in error and "packed copy" not in error and "Traceback" not in error
    assert "the newest saved version without NaN or infinite values is 1: runs/run/checkpoints/step_1" in error
    assert versions(here / "runs/run") == [1]
    assert (here / "runs/run/checkpoints/latest").resolve().name == "step_1"


async def test_a_state_that_is_not_finite_is_not_saved_though_the_weights_are(tmp_path: Path) -> None:
    """A second moment that overflowed: its weights stand still for ever, and are finite."""
    found = r"version 10 is not saved: state\.optimizer\..*exp_avg_sq holds NaN or infinite"
    with pytest.raises(DivergenceError, match=found) as refused:
        async with Runtime(config_of(tmp_path, "train.max_steps=10", base=QUICK)) as runtime:
            runtime.start("spoil", spoil, runtime)
            await runtime.run()
    assert any("no version was saved" in note for note in refused.value.__notes__)
    assert versions(tmp_path / "runs/run") == []


async def test_weights_that_are_not_finite_are_a_note_of_the_error_that_ended_the_run(tmp_path: Path) -> None:
    async def fail() -> None:
        await spoil(runtime)
        raise Planted

    with pytest.raises(Planted) as caught:
        async with Runtime(config_of(tmp_path, "train.max_steps=1000", base=QUICK)) as runtime:
            runtime.start("spoil", fail)
            await runtime.run()
    refused, last_good = caught.value.__notes__[-2:]
    assert "exp_avg_sq holds NaN or infinite" in refused and last_good == "no version was saved"


async def test_a_run_is_saving_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a copy waits for an evaluation: such a copy is not written if the run ends first."""
    seen: list[tuple[int, bool]] = []
    write = CheckpointStore.save_in_thread

    async def watched(store: CheckpointStore, version: int, *writers: Any) -> None:
        seen.append((version, runtime.saving()))
        await write(store, version, *writers)

    monkeypatch.setattr(CheckpointStore, "save_in_thread", watched)
    async with Runtime(config_of(tmp_path, "train.max_steps=3", "checkpoint.every=2", base=QUICK)) as runtime:
        await runtime.run()
    assert seen == [(2, True), (3, True)]

    async def fail_at_step_3() -> None:
        async for report in steps:
            if report.version == 3:
                seen.append((0, runtime.saving()))
                raise Planted

    monkeypatch.setattr(Evaluations, "wait_reported", lambda evaluations: anyio.sleep_forever())
    with pytest.raises(Planted):
        async with Runtime(config_of(tmp_path, "run.name=two", "checkpoint.every=2", base=QUICK)) as runtime:
            steps = runtime.steps()
            runtime.start("fail", fail_at_step_3)
            await runtime.run()
    assert seen[2:] == [(0, False), (runtime.version, True)]


async def spoil(runtime: Runtime) -> None:
    core = runtime.built.core
    assert core is not None
    optimizer = core.optimizer
    await anext(aiter(runtime.steps()))
    moments = optimizer.optimizer.state[optimizer.parameters[0]]["exp_avg_sq"]
    await runtime.built.lanes[0].run(lambda: moments.fill_(torch.inf), name="spoil")


def test_the_place_of_a_value_that_is_not_finite() -> None:
    sound = {"a": [torch.arange(3), torch.empty(0)], "b": {"c": torch.ones(2, dtype=torch.bfloat16)}, "d": 5}
    assert non_finite_tensor(sound) is None
    assert non_finite_tensor(sound | {"e": (torch.ones(2), torch.tensor([1.0, -torch.inf]))}) == "e.1"
    assert non_finite_tensor({"b": {"c": torch.tensor([torch.nan, 1.0], dtype=torch.bfloat16)}}) == "b.c"
    assert non_finite_tensor(torch.tensor(torch.inf), "x") == "x"


TREE: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": {"path": f"{MODEL}:build", "dtype": "float32", "lora": {"rank": 2}},
    "algorithm": {"kl": {"coef": 0.1}},  # the reference is part of the state
    "checkpoint": {"every": 1, "keep": 0},
    "telemetry": {"live": "plain", "trace": False, "report": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main([str(write_yaml(folder, TREE)), f"run.dir={folder}/my runs"]) == 0
    return folder


@pytest.fixture
def three(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of three steps, in a run directory whose path a shell would cut."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "my runs", "my runs", symlinks=True)
    write_yaml(tmp_path, TREE | {"run": {"dir": "my runs"}})
    return tmp_path / "my runs/run/checkpoints"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_no_damaged_file_loads_and_each_is_named(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from chaos.checkpoint import Outcome, attack

    found = attack(three / "step_3", flips=8)
    assert {"adapter/adapter_model.safetensors", "config.json", "model.safetensors", "tokenizer.json"} <= found.keys()
    assert {"state/manifest.json", "state/run.json", "state/trainer.pt"} <= found.keys()
    assert found == dict.fromkeys(found, Outcome(places=10))


def test_a_damaged_checkpoint_ends_a_resume_and_the_way_out_works(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three are damaged: the oldest one is offered, by a command that does what it says."""
    flip(three / "step_3/state/trainer.pt")
    flip(three / "step_2/state/run.json")
    more = ["run.yaml", "resume=true", "train.max_steps=4"]
    assert main(more) == 5
    said = capsys.readouterr().err
    assert "step_3 is damaged: state/trainer.pt is not what was written (its SHA-256 differs)" in said
    [command] = re.findall(r"step_1 is intact: run `(.*)`, then resume=true continues from it", said)
    assert main(more) == 5  # nothing is fallen back to by itself
    assert [line["step"] for line in metrics_of(three.parent)] == [1, 2, 3]
    subprocess.run(command, shell=True, check=True)
    capsys.readouterr()
    assert main(more) == 0
    assert [line["step"] for line in metrics_of(three.parent)] == [1, 2, 3, 4]
    assert command_line(["check", str(three.parent)]) == 0  # the damaged ones were written again


def test_without_an_earlier_one_that_is_whole_this_is_said(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2, 3):
        flip(three / f"step_{version}/config.json")
    assert main(["run.yaml", "resume=true"]) == 5
    assert "no earlier checkpoint here is intact; run.overwrite=true starts" in capsys.readouterr().err


def test_a_run_that_starts_from_a_damaged_checkpoint_is_refused(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a model, its tokenizer, or a judge. What lies in `state/` is not read then, and does not matter."""
    plain = ["run.yaml", "run.dir=other", "model.lora.rank=0", "train.max_steps=1", "run.overwrite=true"]
    start = f"model.path={three / 'latest'}"
    flip(three / "step_3/state/trainer.pt")
    assert main([*plain, start]) == 0
    flip(three / "step_3/model.safetensors")
    capsys.readouterr()
    for settings in (
        [start],
        [start, "--dry-run"],
        [f"model.tokenizer={three / 'step_3'}", f"model.path={three / 'step_2'}"],
    ):
        assert main([*plain, *settings]) == 5
        said = capsys.readouterr().err
        assert f"{settings[0].partition('=')[0]}: the checkpoint {three}" in said
        assert "is damaged: model.safetensors is not what was written" in said
        assert f"asyncrl check '{three}'" in said
    assert command_line(["check-model", str(three / "latest")]) == 2
    assert "model.safetensors is not what was written" in capsys.readouterr().err
    (three / "step_3/state/manifest.json").unlink()  # somebody who changed it on purpose
    flip(three / "step_3/model.safetensors")
    assert main([*plain, start]) == 0


@contextlib.contextmanager
def at_most(free: int) -> Iterator[None]:
    """So many descriptors beside those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
    try:
        with eaten(free):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def eaten(left: int = 0) -> Iterator[None]:
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for each in held:
            os.close(each)


@pytest.mark.parametrize("free", [0, 3, 12])
def test_the_start_says_what_is_missing_and_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], free: int
) -> None:
    file = str(write_yaml(here, DRY))
    with at_most(free):
        assert main([file]) == 2
    said = capsys.readouterr().err
    assert "oo many open files" in said and "`ulimit -n 4096`" in said and "Traceback" not in said


def test_a_full_table_of_the_machine_is_not_blamed_on_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    def start() -> int:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    assert report_errors(start) == PlatformError.exit_code
    said = capsys.readouterr().err
    assert "fs.file-max" in said and "ulimit" not in said


class Planted(Exception):
    pass


@pytest.mark.parametrize(("settings", "ends"), [((), Planted), (("checkpoint.every=1",), CheckpointError)])
async def test_the_last_checkpoint_has_descriptors_of_its_own(
    tmp_path: Path, settings: tuple[str, ...], ends: type[Exception]
) -> None:
    with pytest.raises(ends) as caught, contextlib.ExitStack() as stack:
        async with Runtime(config_of(tmp_path, "train.max_steps=100", *settings)) as runtime:

            async def use_up() -> None:
                async for report in steps:
                    if report.version == 2:
                        await offload(lambda: stack.enter_context(at_most(0)), "leak")
                    elif ends is Planted and report.version == 5:
                        raise Planted

            steps = runtime.steps()
            runtime.start("a leak", use_up)
            await runtime.run()
    assert caught.value.__notes__[0] == ("in a leak" if ends is Planted else "in checkpoint")
    assert ends is Planted or "`ulimit -n 4096`" in caught.value.__notes__[-1]
    assert CheckpointStore(tmp_path / "runs/run/checkpoints").latest_version() == runtime.version >= 2


async def test_what_closing_raises_is_a_note_of_the_error_that_ended_the_run(tmp_path: Path) -> None:
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with Runtime(config_of(tmp_path, base=DRY)) as runtime:
            closed = runtime.built.lanes[0].aclose

            async def fails() -> None:
                await closed()
                raise LifecycleError("the lane did not close")

            runtime.built.lanes[0].aclose = fails
            raise mine
    assert caught.value is mine and mine.__notes__ == ["and at the end: LifecycleError: the lane did not close"]


@pytest.mark.parametrize(
    ("generation", "config", "written"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {}, {"do_sample": None, "temperature": None, "top_p": None}),
        ({"temperature": 0.6, "do_sample": True}, {}, {"do_sample": True, "temperature": 0.6}),
        ({"pad_token_id": -1, "length_penalty": 2.0}, {}, {"pad_token_id": None, "length_penalty": None}),
        ({}, {"temperature": 0.6, "do_sample": True}, {"do_sample": True, "temperature": 0.6}),
        ({}, {"num_beams": 3}, {"num_beams": 3}),
    ],
)
def test_generation_settings_that_transformers_does_not_write_are_made_writable(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], written: dict[str, Any]
) -> None:
    """What has an effect keeps it: a greedy model stays greedy, a sampling one samples as it did."""
    model, tokenizer = build(0)
    for holder, values in ((model.generation_config, generation), (model.config, config)):
        for name, value in values.items():
            setattr(holder, name, value)
    require_saveable(model, tokenizer)
    model.save_pretrained(tmp_path)  # raises where a checkpoint could not be written
    read = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(read, name) for name in written} == written


def test_more_tokens_than_rows_are_named() -> None:
    def refused(change: Callable[[Any, Any], object]) -> str:
        model, tokenizer = build(0)
        change(model, tokenizer)
        with pytest.raises(ConfigError, match=f"the embedding has {model.config.vocab_size} rows") as error:
            require_ids_fit(model, tokenizer)
        return str(error.value)

    rows = build(0)[0].config.vocab_size
    spare = rows - len(build(0)[1])
    added = [f"<{number}>" for number in range(spare + 7)]
    said = refused(lambda model, tokenizer: tokenizer.add_tokens(added))
    assert f"'{added[spare]}' ({rows}), " in said and "and 2 more" in said and added[spare - 1] not in said
    assert "generation_config.eos_token_id (999)" in refused(
        lambda model, tokenizer: setattr(model.generation_config, "eos_token_id", [1, 999])
    )
    assert "config.pad_token_id (999)" in refused(lambda model, tokenizer: setattr(model.config, "pad_token_id", 999))
    model, tokenizer = build(0)
    tokenizer.add_tokens([*added[:spare], "<image>"])
    tokenizer.image_token = "<image>"  # as Gemma 3's text models have it from their larger sisters
    require_ids_fit(model, tokenizer)


@pytest.mark.parametrize(
    "change",
    [
        "model.generation_config.num_return_sequences = 3",
        "model.config.own = {1, 2}",
        "tokenizer.init_kwargs['own'] = object()",
    ],
)
def test_a_run_that_could_write_no_checkpoint_ends_before_its_first_step(
    here: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    lines = "model, tokenizer = runtime_model.build(seed)", change, "return model, tokenizer"
    (here / "model.py").write_text("import runtime_model\ndef build(seed):\n    " + "\n    ".join(lines))
    file = str(write_yaml(here, REAL))
    for more in ("--dry-run", "train.max_steps=1"):
        assert main([file, "model.path=model.py:build", more]) == 2
        assert "no checkpoint of this model and tokenizer can be written" in capsys.readouterr().err
    assert not list((here / "runs").rglob("step_*"))


def test_a_seed_of_64_bits_is_taken_everywhere(here: Path) -> None:
    largest = 2**64 - 1
    file = str(write_yaml(here, REAL | {"replay": {"size": 8}, "seed": largest}))
    assert main([file, "train.max_steps=1", "model.lora.rank=2"]) == 0
    assert main([file, "train.max_steps=2", "model.lora.rank=2", "resume=true"]) == 0
    with pytest.raises(ConfigError, match=rf"seed is {largest + 1} .*expected an integer of at most 64 bits"):
        load_config((), [f"seed={largest + 1}"])
    signed = hashlib.blake2b(struct.pack("<qqq", -1, 5, 6), digest_size=8, person=b"asyncrl-episode").digest()
    assert episode_seed(largest, 5, 6) == int.from_bytes(signed, "little") >> 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_checkpoints_that_cannot_be_written_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "runs/run/checkpoints").mkdir(parents=True, mode=0o500)
    assert main([str(write_yaml(tmp_path, REAL)), f"run.dir={tmp_path}/runs"]) == 2
