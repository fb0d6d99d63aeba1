"""The protocol has one set of steps: in the C code, on its page and in the model; and a check that can fail."""

import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "model" / "protocol.pml"
ADOPTION = ROOT / "model" / "adoption.pml"
UNMODELLED: dict[str, list[int]] = {"D2": [], "D3": []}
LABEL = r"[A-Z]\d[a-z]?"


def steps_in_code() -> dict[str, set[str]]:
    """Label to the files that bear it."""
    found = defaultdict(set)
    for source in (ROOT / "csrc").glob("*/*.[ch]"):
        for label in re.findall(r'SHMS_STEP\("(\w+)"\)', source.read_text()):
            found[label].add(source.name)
    return dict(found)


def steps_in_model(model: Path = MODEL) -> dict[str, list[int]]:
    """Label to the lines that bear it."""
    found = defaultdict(list)
    for number, line in enumerate(model.read_text().splitlines(), 1):
        for comment in re.findall(r"/\*(.*?)\*/", line):
            for label in re.findall(rf"\b({LABEL}):", comment):
                found[label].append(number)
    return dict(found)


def steps_in_models() -> dict[str, list[int]]:
    """The same, in the first model that has the label; the page has a table for each."""
    return steps_in_model(ADOPTION) | steps_in_model() | UNMODELLED


def rows_in_docs() -> dict[str, tuple[str, list[int]]]:
    """Label to the third and fourth column."""
    page = (ROOT / "docs" / "concepts" / "protocol.md").read_text()
    rows = re.findall(rf"^\| `({LABEL})` \| .* \| (.*) \| ([\d, ]+|-) \|$", page, re.M)
    return {label: (place, [int(n) for n in re.findall(r"\d+", lines)]) for label, place, lines in rows}


def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_check", ROOT / "model" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_code_models_and_docs_have_the_same_steps() -> None:
    assert set(steps_in_code()) == set(steps_in_models()) == set(rows_in_docs())


def test_the_tables_in_the_docs_name_the_lines_of_the_models() -> None:
    assert {label: lines for label, (_, lines) in rows_in_docs().items()} == steps_in_models()


def test_the_table_in_the_docs_names_the_functions_that_bear_the_steps() -> None:
    for label, (place, _) in rows_in_docs().items():
        named = re.findall(r"`(\w+)`, (\w+\.c)", place)
        assert {file for _, file in named} == steps_in_code()[label]
        for function, file in named:
            head = rf"^[a-z][^\n]*\b{function}\([^;{{}}]*\) {{$"  # of the definition, and of nothing before it
            body = re.search(rf"{head}.*?^}}", next((ROOT / "csrc").glob(f"*/{file}")).read_text(), re.M | re.S)
            assert body is not None
            assert f'SHMS_STEP("{label}")' in body[0]


def test_every_mutation_of_the_models_is_checked_and_explained() -> None:
    switches = {
        name
        for model in (ROOT / "model").glob("*.pml")
        for name in re.findall(r"\bMUT_([A-Z0-9_]+)", model.read_text())
    }
    explained = re.findall(r"^\| ([A-Z0-9_]+) \|", (ROOT / "model" / "README.md").read_text(), re.M)
    checked = [mutation.name for mutation in check().MUTATIONS]
    assert sorted(switches) == sorted(checked) == sorted(explained)


FINISHED = """
Full statespace search for:
	never claim         	- (none specified)

State-vector 92 byte, depth reached 295, errors: 0
"""


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, FINISHED, True),
        (1, FINISHED, False),
        (0, "", False),
        (0, FINISHED.replace("errors: 0", "errors: 1"), False),
        (0, FINISHED.replace("errors: 0", "errors: 10"), False),
        (0, "error: max search depth too small" + FINISHED, False),
        (0, "pan: out of memory" + FINISHED, False),
        (0, "pan: reached -DMEMLIM bound\nWarning: Search not completed" + FINISHED, False),
    ],
)
def test_only_a_finished_search_without_errors_counts_as_holding(status: int, output: str, expected: bool) -> None:
    assert check().holds(status, output) is expected


def test_a_mutation_fails_only_by_the_assertion_that_is_to_notice() -> None:
    module = check()
    output = "pan:1: assertion violated go (at depth 338)\n" + FINISHED
    assert module.fails(output, module.STUCK)
    assert not module.fails(output, module.VIEW)
    assert not module.fails("pan:1: invalid end state (at depth 12)\n", module.STUCK)
    assert not module.fails(FINISHED, module.STUCK)
