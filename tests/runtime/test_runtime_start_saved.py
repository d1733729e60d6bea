"""Tried before the first step: that a checkpoint can be written, that token ids have rows, that a seed is taken."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import REAL, write_yaml
from runtime_model import build
from transformers import GenerationConfig

from asyncrl.config.load import load_config
from asyncrl.environments.single_turn import episode_seed
from asyncrl.errors import ConfigError
from asyncrl.main import main
from asyncrl.models.loading import require_rows, require_saveable


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


def unwritable_generation(model: Any, tokenizer: Any) -> None:
    model.generation_config.num_return_sequences = 3


def unwritable_config(model: Any, tokenizer: Any) -> None:
    model.config.own = {1, 2}


def unwritable_tokenizer(model: Any, tokenizer: Any) -> None:
    tokenizer.init_kwargs["own"] = object()


def test_more_tokens_than_rows_are_named() -> None:
    def refused(change: Callable[[Any, Any], object]) -> str:
        model, tokenizer = build(0)
        change(model, tokenizer)
        with pytest.raises(ConfigError, match=f"the embedding has {model.config.vocab_size} rows") as error:
            require_rows(model, tokenizer)
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
    require_rows(model, tokenizer)


@pytest.mark.parametrize("change", [unwritable_generation, unwritable_config, unwritable_tokenizer])
def test_a_run_that_could_write_no_checkpoint_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        f"import {__name__} as own\n"
        "def build(seed):\n"
        "    built = own.build(seed)\n"
        f"    own.{change.__name__}(*built)\n"
        "    return built\n"
    )
    file = str(write_yaml(tmp_path, REAL))
    for more in ("--dry-run", "train.max_steps=1"):
        assert main([file, "model.path=model.py:build", more]) == 2
        assert "no checkpoint of this model and tokenizer can be written" in capsys.readouterr().err
    assert not list((tmp_path / "runs").rglob("step_*"))


def test_a_seed_of_64_bits_is_taken_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    largest = 2**64 - 1
    file = str(write_yaml(tmp_path, REAL | {"replay": {"size": 8}, "seed": largest}))
    assert main([file, "train.max_steps=1", "model.lora.rank=2"]) == 0
    assert main([file, "train.max_steps=2", "model.lora.rank=2", "resume=true"]) == 0
    with pytest.raises(ConfigError, match=rf"seed is {largest + 1} .*expected an integer >= 0 and <= {largest}"):
        load_config((), [f"seed={largest + 1}"])
    signed = hashlib.blake2b(struct.pack("<qqq", -1, 5, 6), digest_size=8, person=b"asyncrl-episode").digest()
    assert episode_seed(largest, 5, 6) == int.from_bytes(signed, "little") >> 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_checkpoints_that_cannot_be_written_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "runs/run/checkpoints").mkdir(parents=True, mode=0o500)
    assert main([str(write_yaml(tmp_path, REAL)), f"run.dir={tmp_path}/runs"]) == 2
