"""The documentation: every Python block runs, every command and test that a page names exists, every page is listed.

A block that is no program by itself says so where readers see it, in the title of its frame, and why:
```` ```python title="Fragment: …" ````. It must still be Python.
"""

import ast
import re
import runpy
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

import shmstore
from tests.support import Child

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONCEPTS = DOCS / "concepts"
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted(DOCS.rglob("*.md"))]
FRAGMENT = re.compile(r'title="Fragment: ([^"]+)"')


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0].lower() if self.info.split() else ""

    @property
    def fragment(self) -> str | None:
        found = FRAGMENT.search(self.info)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    """Return the fenced blocks of a page, also indented ones; ValueError if a fence is not closed."""
    found: list[Block] = []
    inside: list[str] | None = None
    fence, start, info, indent = "", 0, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"( *)(`{3,}|~{3,}) *(.*)$", line)
        if inside is None:
            if mark:
                indent, fence, info, start, inside = len(mark[1]), mark[2], mark[3], number, []
        elif mark and mark[2].startswith(fence) and not mark[3]:
            found.append(Block(page, start, info, "".join(f"{line[indent:]}\n" for line in inside)))
            inside = None
        else:
            inside.append(line)
    if inside is not None:
        raise ValueError(f"{page}:{start}: the block is not closed")
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text(encoding="utf-8"))]
SNIPPET = "--8<-- "  # the whole file, which `make docs` puts there; tests/test_examples.py runs it
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.text.startswith(SNIPPET)]


def run(path: str, folder: Path) -> None:
    import os
    import sys

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("block", [block for block in PYTHON if block.fragment is None], ids=str)
def test_a_python_block_runs_as_it_stands(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "prometheus_client" in block.text or "shmstore.metrics" in block.text:
        pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed; `make test` installs it")
    if "pyarrow" in block.text:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; `make test` installs it")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the processes that it spawns
    program = tmp_path / "program.py"
    program.write_text(block.text, encoding="utf-8")
    child = Child(run, str(program), tmp_path)
    try:
        child.join()
    finally:
        child.kill()
    assert ["program.py"] == [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"]


def test_a_fragment_is_python_and_says_why_it_is_one() -> None:
    for block in PYTHON:
        if block.fragment is not None:
            ast.parse(block.text)
            assert len(block.fragment.split()) >= 3, f"{block}: the reason is too short to be one"


def test_what_a_page_quotes_of_an_example_is_a_part_of_it() -> None:
    quoted = [(block, found[1]) for block in BLOCKS if (found := re.search(r'title=".*(examples/[^"]+)"', block.info))]
    assert {"examples/engine.py", "examples/c/producer.c"} <= {name for _, name in quoted}
    for block, example in quoted:
        part = block.text in (ROOT / example).read_text(encoding="utf-8")
        assert part or block.text == f'--8<-- "{example}"\n', f"{block} is not in {example}"


def test_a_picture_is_read_without_a_font_or_a_style_from_elsewhere_and_on_any_background() -> None:
    pictures = [path for path in DOCS.rglob("*.svg") if path.name not in ("dump.svg", "top.svg")]  # of commands
    assert len(pictures) > 5
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        (width, height), tags = (root.get("width"), root.get("height")), [part.tag.rpartition("}")[2] for part in root]
        assert {"title", "rect"} <= set(tags) <= {"title", "desc", "defs", "rect", "text", "path", "line"}, path
        ground = root[tags.index("rect")]
        assert (width, height) == (ground.get("width"), ground.get("height")), f"{path} has no background"
        assert "http" not in path.read_text(encoding="utf-8").replace('xmlns="http', ""), path


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def test_make_alone_says_what_there_is_to_make() -> None:
    said = subprocess.run(["make", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert make_targets() - {"demo-announced"} == {line.split()[0] for line in said.splitlines()}


def test_every_make_target_that_a_page_names_exists() -> None:
    named = {
        target
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"demo", "test", "docs", "peers"} <= named
    assert set() == named - make_targets()


def test_every_command_that_a_page_names_exists() -> None:
    from shmstore.cli.main import all_commands

    known = {command.name for command in all_commands()}
    for block in BLOCKS:
        if block.language == "sh":
            for name in re.findall(r"^shmstore ([a-z]+)", block.text, re.M):
                assert name in known, f"{block}: shmstore {name}"


def test_every_test_that_a_page_names_exists() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*") if path.suffix in (".py", ".c")]
    known = {path.name for path in files}
    for path in files:
        known |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        for name in re.findall(r"`(?:tests/)?(test_[\w.]+)`", page.read_text(encoding="utf-8")):
            assert name in known, f"{page.name} names {name}"
    reliability = (CONCEPTS / "reliability.md").read_text(encoding="utf-8")
    assert len(re.findall(r"`test_", reliability)) > 50


def test_the_reliability_page_has_every_promise_of_the_design() -> None:
    promises = re.findall(r"^(\d)\. \*\*(.+?)\.?\*\*", (CONCEPTS / "design.md").read_text(encoding="utf-8"), re.M)
    headings = re.findall(r"^### (\d)\. (.+)$", (CONCEPTS / "reliability.md").read_text(encoding="utf-8"), re.M)
    assert len(promises) >= 7
    assert promises == headings


def test_the_reliability_page_counts_the_mutations_of_the_models() -> None:
    said = re.search(r"(\d+) mutations", (CONCEPTS / "reliability.md").read_text(encoding="utf-8"))
    assert said
    assert int(said[1]) == len(re.findall(r"^    Mutation\(", (ROOT / "model" / "check.py").read_text(), re.M))


def test_the_table_of_extras_has_each_one_that_is_not_for_work_on_shmstore() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (DOCS / "index.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    assert extras.keys() - {"bench", "demo", "dev", "docs"} == set(re.findall(r"^\| `(\w+)` \|", table, re.M))


def test_the_table_of_kernels_has_each_call_that_needs_a_new_one() -> None:
    named = set(re.findall(r"`(\w+)`", (DOCS / "reference" / "versions.md").read_text(encoding="utf-8")))
    calls = re.compile(r"\b(F_OFD_\w+|MADV_\w+|SYS_\w+|(?:getrandom|memfd_create|posix_fallocate)(?=\())")
    used = {call for path in (ROOT / "csrc").rglob("*.c") for call in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"F_OFD_SETLK", "MADV_COLLAPSE", "getrandom"} <= used
    assert set() == used - named


def test_the_table_of_layouts_has_that_of_this_version() -> None:
    release = ".".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"].split(".")[:2])
    header = (ROOT / "csrc" / "store" / "layout.h").read_text(encoding="utf-8")
    (layout,) = re.findall(r"^#define SHMS_LAYOUT_VERSION (\d+)u", header, re.M)
    assert f"\n| {release} | {layout} |\n" in (DOCS / "reference" / "versions.md").read_text(encoding="utf-8")


def test_a_line_of_code_has_120_columns_at_most() -> None:
    """docs/wide.css makes room for so many; the menu leaves no more of a window of 1280 pixels."""
    assert [] == [str(block) for block in BLOCKS if any(len(line) > 120 for line in block.text.splitlines())]


@pytest.mark.parametrize("of", [shmstore.ObjectStoreWriter, shmstore.ObjectStoreReader])
def test_the_store_page_lists_each_call_that_there_is_in_an_order_of_its_own(of: type) -> None:
    page = (DOCS / "reference" / "store.md").read_text(encoding="utf-8").partition(f"::: shmstore.{of.__name__}\n")[2]
    listed = re.findall(r"\w+", page.partition("members: [")[2].partition("]")[0])
    assert sorted(listed) == sorted(name for name in dir(of) if not name.startswith("_"))
    assert "group_by_category: false" in page.partition("members: [")[0], "else properties come before what makes one"


def test_the_store_page_shows_no_base_that_is_not_public_and_no_constructor_that_nobody_calls() -> None:
    page = (DOCS / "reference" / "store.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^::: shmstore\.(\w+)\n(.*?)(?=^:::|\Z)", page, re.M | re.S))
    based = {name for name in blocks if getattr(shmstore, name).__bases__ != (object,)}
    assert {"LeasedRef", "StoreStats"} <= based == {name for name in blocks if "show_bases: false" in blocks[name]}
    assert {"LeasedRef", "PinnedRef", "Reservation", "Claim"} < {
        name for name in blocks if "merge_init_into_class: false" in blocks[name]
    }


def test_each_file_that_the_architecture_names_exists() -> None:
    page = (DOCS / "contributing" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+\.(?:c|h|py|md|pml))`", page))
    there = [str(path) for folder in ("csrc", "shmstore", "tests", "docs") for path in (ROOT / folder).rglob("*.*")]
    assert len(named) > 25
    assert [] == [
        name for name in named if not (ROOT / name).exists() and not any(p.endswith("/" + name) for p in there)
    ]


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == menu


@pytest.mark.parametrize("page", ["README.md", "bench/README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_the_links_of_a_page_outside_the_built_ones_lead_somewhere(page: str) -> None:
    """`make docs` asks for all others."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [] == [link for link in links if not ((ROOT / page).parent / link).exists()]


def test_the_figures_of_the_readme_are_those_of_the_benchmark_page() -> None:
    page = (DOCS / "contributing" / "benchmarks.md").read_text(encoding="utf-8")
    tables = (page.partition(f"## {title}, 1 reader: medians")[2].partition("\n## ")[0] for title in ("Put", "Hit"))
    put, hit = (dict(re.findall(r"^\| (.+?) (?:\| .+? ){3}\| (.+?) \| .+? \|$", table, re.M)) for table in tables)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("(a hit) |")[2].partition("\n\n")[0]
    said = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", readme, re.M)
    assert 6 == len(said)
    assert said == [(name, put[name], hit[name]) for name, _, _ in said]
