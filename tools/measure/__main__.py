"""Measurements. Each names the machine, and what stands beside its numbers.

python tools/measure board --repeat 15
python tools/measure steps --dry
"""

import sys
from pathlib import Path

# In the place of this folder: modules are found as `measure.NAME`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from commands import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("measure", __doc__))
