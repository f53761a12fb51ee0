"""The table of cases in README.md names tests that are there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def rows(text: str) -> dict[int, str]:
    """Of the table of cases: number, and its cell of tests."""
    lines = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert all(len(line) == 5 for line in lines)
    return {int(line[1]): line[3] for line in lines}


def absent(cell: str) -> list[str]:
    """What a cell names that is no test, nor a file of them."""
    names = [name.strip(" `") for name in re.split(r",| and ", re.sub(r"\([^)]*\)", "", cell))]
    return [name for name in names if not there(*name.partition("::")[::2])]


def there(file: str, test: str) -> bool:
    paths = [path for path in (TESTS / f"test_{file}.py", TESTS / f"{file}.py") if path.exists()]
    if not paths or not test:
        return bool(paths)
    body = ast.parse(paths[0].read_text(encoding="utf-8")).body
    return any(isinstance(one, ast.FunctionDef) and one.name == f"test_{test}" for one in body)


def test_every_case_names_tests_that_are_there() -> None:
    found = rows((TESTS / "README.md").read_text(encoding="utf-8"))
    assert list(found) == list(range(1, len(found) + 1))
    assert {number: missing for number, cell in found.items() if (missing := absent(cell))} == {}


def test_a_test_that_is_not_there_is_found() -> None:
    """A beginning of a name is no name; what parentheses say of a test is not read."""
    assert absent(" store::cases_38 (no index), coded_batch (the whole file), `store_kill`, nothing and cases_table::rows ") == [
        *("store::cases_38", "nothing", "cases_table::rows")
    ]
