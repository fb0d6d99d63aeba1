"""Compare an engine with what a plug-in knows of it, by its sources: nothing of it is imported.

A parameter that one of the known versions lacks has a "?".
"""

from __future__ import annotations

import argparse
import ast
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

_Scope = ast.ClassDef | ast.FunctionDef
_METHOD = re.compile(r"(\w+)\(([^)]*)\)")


@dataclass(frozen=True)
class Known:
    """What must be found of one class or function; a string is a list of names."""

    file: str
    """Its path below the package."""
    name: str
    """The class, or the function."""
    methods: str = ""
    """All public methods of the class, with all their parameters."""
    starts: str = ""
    """Methods that may have more parameters behind these; an `__init__` may not."""
    has: str = ""
    """What an instance of the class has, or what the function uses."""
    fields: str = ""
    """All fields of a dataclass."""
    reads: tuple[str, str] = ("", "")
    """An attribute that holds an object, and all that the class reads of that object."""


class Sources:
    """The source files of an engine; `read` returns one as text, by its path in the package, or raises an OSError."""

    def __init__(self, package: str, read: Callable[[str], str]) -> None:
        self.package, self.read = package, read
        self._trees: dict[str, dict[str, _Scope]] = {}

    def find(self, file: str, name: str) -> _Scope | None:
        """Return a class or function at the top of a file; None if it is not there."""
        if file not in self._trees:
            try:
                body = ast.parse(self.read(file)).body
            except OSError:
                body = []
            self._trees[file] = {node.name: node for node in body if isinstance(node, _Scope)}
        return self._trees[file].get(name)

    def members(self, file: str, scope: _Scope) -> Iterator[ast.stmt]:
        """Yield what is defined in a class, after its bases of the same file."""
        for base in getattr(scope, "bases", ()):
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (above := self.find(file, name.id)):
                yield from self.members(file, above)
        yield from scope.body


@cache
def installed_sources(package: str) -> Sources:
    """Return the sources of the engine in this environment; ModuleNotFoundError if there is none."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"no module named {package}")
    (folder,) = map(Path, found.submodule_search_locations)
    return Sources(package, lambda file: (folder / file).read_text(encoding="utf-8"))


def difference(sources: Sources, known: Iterable[Known]) -> str | None:
    """Return the first difference between an engine and what is known of it, as a part of a sentence, or None."""
    return next((found for one in known for found in _differences(sources, one)), None)


def _differences(sources: Sources, known: Known) -> Iterator[str]:
    scope = sources.find(known.file, known.name)
    if scope is None:
        yield f"it has no {known.name} in {sources.package}/{known.file}"
        return
    members = list(sources.members(known.file, scope))
    methods = {node.name: _parameters(node) for node in members if isinstance(node, ast.FunctionDef)}
    for text, whole in ((known.methods, True), (known.starts, False)):
        rows = {name: parameters.split() for name, parameters in _METHOD.findall(text)}
        for name, parameters in rows.items():
            if name in methods:
                exact = whole or name == "__init__"
                yield from _other_parameters(f"{known.name}.{name}", parameters, methods[name], exact)
            else:
                yield f"{known.name}.{name} is missing"
        if whole and rows:
            new = sorted(name for name in methods if not name.startswith("_") and name not in rows)
            yield from (f"{known.name}.{name} is new" for name in new)
    annotated = [node.target for node in members if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    if known.fields and fields != set(known.fields.split()):
        yield f"{known.name} has the fields {' '.join(sorted(fields))}, not {known.fields}"
    if known.has:
        there = fields | methods.keys() | {name for node in members for name in _names(node)}
        yield from (f"{known.name} has no {name}" for name in known.has.split() if name not in there)
    holder, reads = known.reads
    if holder:
        new = sorted({chain for node in members for chain in _chains(node, holder)} - set(reads.split()))
        yield from (f"{known.name} reads {holder}.{chain}" for chain in new)


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _other_parameters(method: str, known: list[str], found: list[str], whole: bool) -> Iterator[str]:
    if not whole:
        if found[: len(known)] != known:
            yield f"{method} does not begin with ({', '.join(known)})"
        return
    names = [name.removesuffix("?") for name in known]
    yield from (f"{method} has no {name}" for name in known if not name.endswith("?") and name not in found)
    yield from (f"{method} has a new parameter {name}" for name in found if name not in names)
    if found != [name for name in names if name in found]:
        yield f"{method} has its parameters in another order"


def _names(node: ast.AST) -> Iterator[str]:
    """Yield each name that is used below a node, and each attribute."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _chains(node: ast.AST, holder: str) -> Iterator[str]:
    """Yield what is read of ``self.holder`` below a node: "coordinator.block_size" for two attributes in a row."""
    inner = set()
    for part in ast.walk(node):  # from outside in
        if isinstance(part, ast.Attribute) and part not in inner:
            names, below = [part.attr], part.value
            while isinstance(below, ast.Attribute):
                inner.add(below)
                names.append(below.attr)
                below = below.value
            if isinstance(below, ast.Name) and below.id == "self" and len(names) > 1 and names[-1] == holder:
                yield ".".join(reversed(names[:-1]))


class _Wheel:
    """A wheel of an engine."""

    def __init__(self, package: str, path: str) -> None:
        self._package, self._files = package, zipfile.ZipFile(path)

    @cached_property
    def version(self) -> str:
        """The version, as its metadata has it; ValueError if there is none."""
        (metadata,) = (name for name in self._files.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        (line,) = re.findall(r"^Version: .+", self._files.read(metadata).decode(), re.MULTILINE)
        return str(line).split()[1]

    def read(self, file: str) -> str:
        try:
            return self._files.read(f"{self._package}/{file}").decode()
        except KeyError:
            raise FileNotFoundError(file) from None


def compare_wheels(
    package: str, engine: str, parts: Mapping[str, Iterable[Known]], arguments: list[str] | None = None
) -> int:
    """Print a row for each wheel, with a column for each part; return 1 if something differs in one of them, else 0."""
    parser = argparse.ArgumentParser(
        prog=f"python -m shmstore.integrations.{package}.compare",
        description=f"Compare wheels of {engine} with what the plug-in knows of it.",
    )
    parser.add_argument("wheels", nargs="+", metavar="WHEEL")
    paths, differs = parser.parse_args(arguments).wheels, False
    print("| " + " | ".join([engine, *parts]) + " |\n" + "|---" * (1 + len(parts)) + "|")
    for path in paths:
        try:
            wheel = _Wheel(package, path)
            version, sources = wheel.version, Sources(package, wheel.read)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            parser.error(f"{path} is not a wheel of {engine}: {error}")
        found = [difference(sources, known) for known in parts.values()]
        differs |= any(found)
        print("| " + " | ".join([version, *(what or "as known" for what in found)]) + " |")
    return int(differs)
