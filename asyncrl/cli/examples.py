"""`asyncrl examples [DIRECTORY]`: lists or copies the example programs and configurations.

A wheel has the examples in `asyncrl/examples` (setup.py copies them); a checkout has them beside the package.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "asyncrl examples [DIRECTORY]: list the examples, or copy them into DIRECTORY (exit code 2, for example if one is there)"
PACKAGE = Path(__file__).resolve().parent.parent


def examples() -> tuple[Path, list[Path]]:
    """(the folder of the examples, paths of the files relative to it). Errors: FileNotFoundError if there is no such folder."""
    folders = (PACKAGE / "examples", PACKAGE.parent / "examples")
    folder = next((folder for folder in folders if (folder / "quickstart.yaml").exists()), None)
    if folder is None:
        raise FileNotFoundError(f"this installation has no examples: neither {folders[0]} nor {folders[1]} has them")
    files = (*folder.glob("*.py"), *folder.glob("*.yaml"), *folder.glob("adapters/*.py"))
    return folder, sorted(path.relative_to(folder) for path in files)


def first_line(path: Path) -> str:
    """The first line of an example's docstring, or of a YAML file's first comment."""
    text = path.read_text(encoding="utf-8")
    lines = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text.lstrip("# ")
    return lines.partition("\n")[0]


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns exit code 0, or 2 after an error."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        folder, found = examples()
        if arguments:
            target = Path(arguments[0])
            existing = [str(path) for path in found if (target / path).exists()]
            if existing:
                raise FileExistsError(
                    f"{target} has {', '.join(existing)} already; nothing was copied: choose another directory"
                )
            (target / "adapters").mkdir(parents=True, exist_ok=True)
            for path in found:
                shutil.copy(folder / path, target / path)
            print(f"copied {len(found)} files; next: asyncrl run {target / 'quickstart.yaml'}")
            return 0
    except OSError as error:
        print(f"asyncrl examples: {error}", file=sys.stderr)
        return 2
    width = max(len(str(path)) for path in found)
    print("\n".join(f"{path!s:{width}}  {first_line(folder / path)}" for path in found))
    print("\nasyncrl examples DIRECTORY copies them into DIRECTORY")
    return 0
