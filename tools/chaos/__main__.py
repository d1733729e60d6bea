"""Attacks: on runs, their parts and their doors. Each says what must hold afterwards, and exits 1 where it does not.

python tools/chaos rings --short
python tools/chaos runs --lives 20
"""

import sys
from pathlib import Path

# In the place of this folder: its `http` is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from commands import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("chaos", __doc__))
