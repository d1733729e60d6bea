"""What asyncrl's own children say of the machine, the model and the versions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.models.native import library as native

from .job import RatesJob

_GEMM, _GEMM_SECONDS = 2048, 2.0
_READ_BYTES, _READ_SECONDS = 1 << 28, 1.0  # more than any cache holds


def rates(job: RatesJob) -> dict[str, Any]:
    found = {"gemm_flops": gemm_rate(job.dtype, job.threads, device=job.device), **model_size(job.model)}
    if job.memory:
        found["read_bytes_per_s"] = read_rate()
    return found | prompt_tokens(job) if job.prompts else found


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Of runs for so long, and of two at least."""
    best, end, done = float("inf"), time.perf_counter() + seconds, 0
    while done < 2 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        done += 1
    return best


def gemm_rate(dtype: str, threads: int, seconds: float = _GEMM_SECONDS, device: str = "cpu") -> float:
    """FLOP/s of the product of two 2048 x 2048 matrices; on a GPU of 8192 x 8192."""
    torch.set_num_threads(threads)
    size = _GEMM if device == "cpu" else 4 * _GEMM
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)
        if device != "cpu":
            torch.cuda.synchronize()

    return 2 * size**3 / best_seconds(multiply, seconds)


def read_rate() -> float:
    """Bytes/s of reading main memory once, in order, by float32 sums."""
    return _READ_BYTES / best_seconds(torch.ones(_READ_BYTES // 4).sum, _READ_SECONDS)


def model_size(path: str) -> dict[str, Any]:
    """Parameters of the matrix products of one token: all linear layers without the head, and the head. No allocation."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return {
        "vocabulary": int(config.get_text_config().vocab_size),
        "decoder_parameters": linear - head.weight.numel(),
        "head_parameters": head.weight.numel(),
    }


def prompt_tokens(job: RatesJob) -> dict[str, Any]:
    """Mean and largest length of the rendered prompts."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    rows = [json.loads(line)["prompt"] for line in Path(job.prompts).read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False) for row in rows]
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return {"prompt_tokens_mean": sum(lengths) / len(lengths), "prompt_tokens_max": max(lengths)}


def versions(*more: str) -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("torch", *more)} | {"kernels": native.build_name()}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {})
