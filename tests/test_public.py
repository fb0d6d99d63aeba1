"""What users may call, with signatures, is in tests/data/public.txt; ``python -m tests.test_public`` writes it anew.

docs/reference/versions.md says which release may change what.
"""

import argparse
import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, is_typeddict

import pytest

import shmstore
from release.notes import notes
from release.version import PLACES, version_in, write
from shmstore.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "data" / "public.txt"
HEADER = ROOT / "csrc" / "store" / "shmstore.h"
MODULES = ("shmstore", *(f"shmstore.{name}" for name in ("serde", "tiers", "multimodal", "scheduler", "metrics")))
SPECIAL = {"__call__", "__contains__", "__enter__", "__getitem__", "__iter__", "__len__"}
PLAIN = (str, bytes, int, float, tuple, type(None))


class _Shown(str):
    __repr__ = str.__str__


def _signature(function: Callable[..., Any]) -> str:
    """Return parameters and defaults; no annotations, whose text differs between versions of Python."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        known = parameter.default is parameter.empty or isinstance(parameter.default, PLAIN)
        default = parameter.default if known else _Shown("...")
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _members(cls: type) -> Iterator[str]:
    """Yield what is not private in a class and in those of ours that it is derived from."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    if is_typeddict(cls):
        fields = {*cls.__annotations__}
    for name in sorted({*dir(cls), *fields}):
        home = next((base for base in cls.__mro__ if name in vars(base)), cls)
        if home.__module__.startswith("shmstore") and (name in SPECIAL or not name.startswith("_")):
            member = getattr(cls, name, None)
            yield f"{name}{_signature(member)}" if callable(member) else name


def _python() -> Iterator[str]:
    listed = set()
    for module in MODULES:
        for name in sorted(import_module(module).__all__):
            value = getattr(import_module(module), name)
            if value in listed:
                yield f"{module}.{name}: as above"
            elif not isinstance(value, type):
                yield f"{module}.{name}{_signature(value) if inspect.isroutine(value) else ''}"
            else:
                listed.add(value)
                bases = [base.__name__ for base in value.__bases__ if issubclass(base, Exception)]
                made = "" if is_typeddict(value) else _signature(value)
                yield f"{module}.{name}{made}{': ' * bool(bases)}{', '.join(bases)}"
                yield from (f"{module}.{name}.{member}" for member in _members(value))


def _commands() -> Iterator[str]:
    parser = build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in sorted(subparsers.choices.items()):
        yield f"shmstore {name}: " + " ".join(sorted("|".join(a.option_strings) or a.dest for a in command._actions))


def _header() -> Iterator[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
    yield from sorted(" ".join(line.split()) for line in re.findall(r"^#define SHMS_.+", text, flags=re.M))
    text = re.sub(r"^#.*|extern \"C\" \{|^\}\n", "", text, flags=re.M)
    for part in re.findall(r"[^;{]+(?:\{[^}]*\}[^;]*)?;", text):
        yield " ".join(part.split())


def listing() -> str:
    """Return one line for each name, in order."""
    return "".join(f"{line}\n" for part in (_python, _commands, _header) for line in part())


def test_what_is_public_is_as_listed() -> None:
    pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed; `make test` installs it")
    listed, found = FILE.read_text(encoding="utf-8").splitlines(), listing().splitlines()
    gone, new = sorted({*listed} - {*found}), sorted({*found} - {*listed})
    assert listed == found, f"gone: {gone}, new: {new}; may they? If so, run `python -m tests.test_public`"


def test_the_version_is_the_same_everywhere() -> None:
    command = [sys.executable, "-m", "shmstore", "--version"]
    assert {shmstore.__version__} == {
        metadata.version("shmstore"),
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.removeprefix("shmstore ").strip(),
        *(version_in(name) for name in PLACES if (ROOT / name).exists()),  # not where it is installed
    }


@pytest.mark.checkout
def test_one_command_writes_the_version_of_a_release(tmp_path: Path) -> None:
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write("3.4.5", "2030-01-02", tmp_path)
    assert {"3.4.5"} == {version_in(name, tmp_path) for name in PLACES}
    assert "## [3.4.5] - 2030-01-02" in (tmp_path / "CHANGELOG.md").read_text()
    for name in PLACES:  # nothing else has changed
        before, after = ((root / name).read_text().splitlines() for root in (ROOT, tmp_path))
        assert 1 == sum(one != other for one, other in zip(before, after, strict=True)), name


@pytest.mark.checkout
def test_only_a_dated_section_of_this_version_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("release.notes.ROOT", tmp_path)
    version, text = version_in("pyproject.toml"), tmp_path / "CHANGELOG.md"
    text.write_text(f"## [{version}] - 2030-01-02\n\nnew\n\n## [0.0.1] - 2026-01-01\n\nold\n")
    assert "new" == notes(version)
    with pytest.raises(SystemExit):
        notes("0.0.1")
    text.write_text(f"## [{version}] - soon\n\nnew\n")
    with pytest.raises(SystemExit):
        notes(version)


@pytest.mark.checkout
def test_actions_of_workflows_are_pinned_to_a_commit() -> None:
    flows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    used = [action for text in flows for action in re.findall(r"uses: *(\S+)", text)]
    assert len(used) > 10
    assert [] == [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)]


if __name__ == "__main__":
    FILE.write_text(listing(), encoding="utf-8")
