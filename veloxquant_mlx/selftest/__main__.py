"""Write veloxquant_mlx/selftest/counts.json: how many rows each column of the kernel table has. Numbers only grow; lower them by hand."""

import json
from pathlib import Path

from veloxquant_mlx.metal import FUNCTIONS
from veloxquant_mlx.selftest.cases import CASES, ERRORS

COUNTS = Path(__file__).with_name("counts.json")


def main() -> None:
    old = json.loads(COUNTS.read_text(encoding="utf-8"))
    new = {}
    for function in FUNCTIONS:
        cases = sum(c.function == function for c in CASES)
        emulated = sum(c.function == function and c.emulate for c in CASES)
        errors = sum(c.function == function for c in ERRORS)
        row = {"definition": cases, "metal": emulated, "cuda": cases, "errors": errors}
        new[function] = {column: max(n, old.get(function, {}).get(column, 0)) for column, n in row.items()}
    COUNTS.write_text(json.dumps({f: row for f, row in new.items() if any(row.values())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
