"""Generation alone with vLLM on the CPU. Runs inside vLLM's own environment: `python vllm_generate.py JOB.json`.

Prints one JSON line at the end. It must not import asyncrl, and no file beside it may be named like a package.
vLLM samples without per-request seeds and returns no log-probs here: both would cost it time, and asyncrl gives both.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import side
import torch
import vllm
from vllm import LLM, SamplingParams

BLOCK = 128  # positions of one block of vLLM's cache on a CPU, and more than a prompt: rows are rounded up to it
GIB = 1 << 30


def cache_bytes(job: dict[str, Any]) -> int:
    """Keys and values of all sequences, rounded up to whole blocks, and a quarter more."""
    config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    position = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * size
    rows = -(-(job["prompt_tokens"] + job["max_tokens"]) // BLOCK) * BLOCK * job["sequences"]
    return max(int(1.25 * rows * position * getattr(torch, job["dtype"]).itemsize), GIB // 4)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout, also while it shuts down, and the answer has to be the last line there
    job = side.job()
    prompts = json.loads(Path(job["prompts"]).read_text(encoding="utf-8"))
    groups = len(prompts) // 2
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["prompt_tokens"] + job["max_tokens"],
        max_num_seqs=job["sequences"],
        kv_cache_memory_bytes=cache_bytes(job),
        seed=job["seed"],
    )

    def generate(rows: list[list[int]], tokens: int) -> int:
        requests = [{"prompt_token_ids": rows[i // job["group_size"]]} for i in range(job["sequences"])]
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate(prompts[groups:], job["warmup_tokens"])
    started = time.perf_counter()
    tokens = generate(prompts[:groups], job["max_tokens"])
    seconds = time.perf_counter() - started
    result = {
        "seconds": seconds,
        "tokens": tokens,
        "peak_bytes": side.peak_bytes(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
    }
    side.answer(result, answer)


if __name__ == "__main__":
    main()
