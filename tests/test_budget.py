"""The house does not grow unnoticed: lines and words stay within the table of CONTRIBUTING.md."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Budget")[2]


def sources(*folders: str) -> Iterable[Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".c", ".h"))
    return (path for path in found if path.parent.name != "include")  # what the build has copied


def pages() -> Iterable[Path]:
    return (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))


COUNTS: dict[str, Callable[[], int]] = {
    "lines of C and Python that are installed": lambda: lines(sources("shmstore", "csrc")),
    "lines of tests": lambda: lines(sources("tests")),
    "words of docs and README": lambda: sum(len(path.read_text(encoding="utf-8").split()) for path in pages()),
}


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


@pytest.mark.parametrize("what", COUNTS)
def test_the_budget_holds(what: str) -> None:
    row = re.search(rf"^\| {what} \| ([\d,]+) \|", TABLE, flags=re.M)
    assert row, f"CONTRIBUTING.md has no row for {what}"
    budget, count = int(row[1].replace(",", "")), COUNTS[what]()
    where = f"in CONTRIBUTING.md, under Budget, in the row '{what}'"
    assert count <= budget * 1.01, (
        f"{count - budget} too many. Remove some, or write {count:,} for {budget:,} {where}, and say what they buy"
    )
    assert count > 0.9 * budget, f"write {count:,} for {budget:,} {where}"
