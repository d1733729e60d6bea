"""The list of models: its head and the documentation say what its rows say; CI looks at twelve of its families or more."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from model_sweep import SAMPLE

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "tools" / "results" / "models.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][1:]


def test_head_and_page_count_what_the_rows_say() -> None:
    status = Counter(row[2] for row in ROWS)
    paths = Counter(row[3].split()[0] for row in ROWS if row[2] == "right")
    right = f"{status['right']} right ({paths['fused']} fused, {paths['packed']} packed, {paths['plain']} plain)"
    assert (
        f"{right}; {status['refused']} refused; 0 WRONG; 0 inner error; {status['not buildable']} not buildable"
        in TABLE
    )
    assert set(status) == {"right", "refused", "not buildable"} and sum(status.values()) == len(ROWS)
    said = f"{len(ROWS)} rows | {right}, {status['refused']} refused with a reason, 0 wrong, 0 inner errors, "
    assert said in (ROOT / "docs" / "benchmarks" / "numerics.md").read_text()


def test_every_refusal_has_its_reason_and_every_right_row_its_numbers() -> None:
    for row in ROWS:
        if row[2] == "right":
            assert all(float(number) <= 1e-4 for number in row[4:7]) and row[7] in ("right", "refused"), row[0]
        else:
            assert len(row[8]) > 20, row[0]


def test_the_sample_of_ci_has_twelve_families_of_every_path() -> None:
    rows = {row[0]: row for row in ROWS}
    families = {re.split(r"[_ ]", name)[0] for name in SAMPLE}
    assert len(families) >= 12 and {rows[name][3].split()[0] for name in SAMPLE} == {"fused", "packed", "plain"}
