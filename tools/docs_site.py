"""Hooks of MkDocs.

The page of all settings is made of `asyncrl run --help`. Pages of docs/ link to files of the repository as they lie there, such as
`../tools/results/models.md`, and these links work on the site, too: each file becomes a page or a file of the site under its own
path. A link to a file that is not there stays as it is, and `--strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from asyncrl.config.describe import help_text

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = [
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "asyncrl/telemetry/assets/metrics.md",
    "tools/results/*.*",
    "examples/*.*",
]
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the page of settings, and what pages may link to outside of docs/."""
    settings = f"# All settings\n\nThis is what `asyncrl run --help` prints.\n\n```text\n{help_text()}\n```\n"
    files.append(File.generated(config, "all-settings.md", content=settings))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Write each link of a page as MkDocs wants it: relative to the page's own place on the site."""
    here = page.file.src_uri
    inside = (ROOT / "docs" / here).exists()
    place = posixpath.join("docs", here) if inside else here

    def written(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2]))
        target = target.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return match[0]
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + match[3]

    return LINK.sub(written, markdown)
