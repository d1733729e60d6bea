"""A measured number needs the machine beside it: its model, and the instructions that torch may use there."""

from __future__ import annotations

from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MEASURING = [path for path in (TOOLS / "measure").glob("*.py") if "def add_options" in path.read_text()]
MEASURING += [TOOLS / f"{name}.py" for name in ("quickstart_curves", "learning_comparison", "model_sweep")]


@pytest.mark.parametrize("tool", MEASURING, ids=lambda tool: tool.stem)
def test_a_tool_that_measures_names_the_instruction_set(tool: Path) -> None:
    text = tool.read_text()
    assert "machine()" in text or "describe_cpu()" in text
    assert "/proc/cpuinfo" not in text and "platform.machine()" not in text, "one place says what a processor can"
