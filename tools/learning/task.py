"""The quickstart's task made small, so that a hundred runs take minutes: a letter, one to four times.

Letters, tokenizer, reward and supervised warm-up are those of `examples/quickstart_model.py`; the model is one layer of
width 64 in place of three of width 128.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import quickstart_model as quickstart

MOST = 4
reward = quickstart.reward


def build(seed: int) -> tuple[Any, Any]:
    """(model, tokenizer); its first samples earn about 0.4."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return quickstart.build(seed, MOST, **sizes, **heads)


def rows() -> list[dict[str, str]]:
    """Prompts with their answers."""
    return quickstart.rows(most=MOST)
