"""The kernels' own test: a table of cases with float64 oracles, for `kvtool selftest` on a user's machine and for the test suite.

`cases` has the rows, `oracles` the right results (NumPy alone), `run` what runs a row, `counts.json` how many rows each function must have.
"""

import json
from pathlib import Path


def expected_counts() -> dict[str, int]:
    """Cases that each function must have."""
    table = json.loads(Path(__file__).with_name("counts.json").read_text(encoding="utf-8"))
    return {function: row["definition"] for function, row in table.items()}
