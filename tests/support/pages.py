"""The code blocks of README.md, CONTRIBUTING.md and docs/, each with what its page says of it.

A comment of Markdown right above a block says how it is checked. `<!-- needs: gpu -->`: something that is not here, so the block is
only parsed. `<!-- test: NAME -->`: a test asks for it by that name and plays it. Without a comment a block is played as what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = ("download", "gpu", "hub", "nodes", "nsys", "vllm", "a run", "hours")
FENCE = re.compile(
    r"(?:^<!-- (needs|test): ([^\n]*?) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block. `language` is empty for a drawing."""

    page: Path
    line: int
    language: str
    text: str
    needs: str = ""
    test: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(test: str | None = None) -> list[Block]:
    """All blocks of all pages; or those that a test plays by this name, in their order."""
    found: list[Block] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            mark, said, _, language, body = match.groups()
            line = text.count("\n", 0, match.start(5)) + 1
            found.append(Block(page, line, language, body, **({mark: said} if mark else {})))
    return found if test is None else [block for block in found if block.test == test]
