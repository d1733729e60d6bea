"""Every adapter has a test against its package, a line in the tool that runs it, and a row of the page."""

from __future__ import annotations

import sys

from adapters_helpers import EXAMPLES

ROOT = EXAMPLES.parents[1]
sys.path.append(str(ROOT / "tools"))
from adapters import PACKAGES


def test_every_adapter_has_a_package_a_test_and_a_row() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {"mcp_tools.py" if name == "mcp" else f"from_{name}.py" for name in PACKAGES}
    page = (ROOT / "docs/coming-from.md").read_text()
    for name in PACKAGES:
        assert (ROOT / f"tests/adapters/test_adapters_{name}.py").exists()
    for file in files:
        assert f"`examples/adapters/{file}`" in page
        lines = (EXAMPLES / file).read_text().count("\n")
        assert 20 <= lines <= 80, (file, lines)
