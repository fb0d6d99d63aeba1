"""The protocol has one set of steps: in the C code, on its page and in the model; and a check that can fail."""

import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

from tests.genmc.__main__ import PROGRAMS, tree
from tests.genmc.orders import ORDERS, STRONG

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "model" / "protocol.pml"
REMOTE = ROOT / "model" / "remote.pml"
UNMODELLED = {"D2", "D3"}
LABEL = r"[A-Z]\d[a-z]?"


def steps_in_code() -> dict[str, set[str]]:
    """Label to the files that bear it."""
    found = defaultdict(set)
    for source in (ROOT / "csrc").glob("*/*.[ch]"):
        for label in re.findall(r'SHMS_STEP\("(\w+)"\)', source.read_text()):
            found[label].add(source.name)
    return dict(found)


def steps_in_models() -> set[str]:
    """The labels in the comments of both models."""
    comments = re.findall(r"/\*(.*?)\*/", MODEL.read_text() + REMOTE.read_text())
    return {label for comment in comments for label in re.findall(rf"\b({LABEL}):", comment)}


def rows_in_docs() -> dict[str, str]:
    """Label to the third column."""
    page = (ROOT / "docs" / "concepts" / "protocol.md").read_text()
    return dict(re.findall(rf"^\| `({LABEL})` \| .* \| (.*) \|$", page, re.M))


def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_check", ROOT / "model" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_code_models_and_docs_have_the_same_steps() -> None:
    assert set(steps_in_code()) == steps_in_models() | UNMODELLED == set(rows_in_docs())


def test_the_table_in_the_docs_names_the_functions_that_bear_the_steps() -> None:
    for label, place in rows_in_docs().items():
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


def test_every_memory_order_has_a_program_that_fails_without_it_or_a_reason() -> None:
    stands = [
        (path.name, found.start())
        for path in (ROOT / "csrc" / "store").glob("*.[ch]")
        for found in re.finditer(STRONG, path.read_text())
    ]
    meant = []
    for order in ORDERS:
        source = (ROOT / "csrc" / "store" / order.file).read_text()
        assert source.count(order.text) == 1, order
        found = re.search(STRONG, order.text)
        assert found is not None
        meant.append((order.file, source.index(order.text) + found.start()))
        assert (order.program in PROGRAMS) != (order.why != ""), order
    assert sorted(meant) == sorted(stands)


def test_the_lines_that_the_checker_needs_otherwise_stand_in_the_code() -> None:
    with tree() as sources:
        assert "#define TURNS 1 " in (sources / "store" / "wait.c").read_text()


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
