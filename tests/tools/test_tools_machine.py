"""A measured number needs the machine beside it: its model, and the instructions that torch may use there."""

from __future__ import annotations

from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# Numbers of these are compared with others of the same call, and stand in no table.
ELSEWHERE = {
    "measure_vllm.py": "vllm_sides.py",  # which prints what it starts with
}
MEASURING = sorted(
    {
        *TOOLS.glob("measure_*.py"),
        *(TOOLS / f"{name}.py" for name in ("quickstart_curves", "learning_comparison", "model_sweep")),
    }
)


@pytest.mark.parametrize("tool", MEASURING, ids=lambda tool: tool.stem)
def test_a_tool_that_measures_names_the_instruction_set(tool: Path) -> None:
    text = (tool.parent / ELSEWHERE.get(tool.name, tool.name)).read_text()
    assert "import describe_cpu" in text and text.count("describe_cpu()") >= 1
    assert "/proc/cpuinfo" not in text and "platform.machine()" not in text, "one place says what a processor can"
