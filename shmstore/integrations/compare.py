"""Compare an engine with what a plug-in knows of it: its version, and the calls between the two.

A plug-in stands for a class of the engine, or wraps its methods. So it relies on the parameters with which the engine
calls it, and on the engine's calling it at all: if a call that ends leases went away, nothing would fail at once.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pkgutil import resolve_name
from types import CodeType
from typing import Any

from packaging.specifiers import SpecifierSet

from shmstore.errors import unless_interrupted

_NAME = re.compile(r"(\w+)(\([^)]*\))?")


@dataclass(frozen=True)
class Has:
    """A class or a module, and what it must have."""

    of: str
    """Its module below the package, and its name in it."""
    names: str
    """Names; one that we answer or wrap has all its parameters: "free(request)".

    A parameter that one of the versions lacks ends in "?", and more may come after "..."."""
    only: bool = False
    """Whether it must have no other public names."""
    asked_by: str = ""
    """Code that must ask an object of this class for exactly these names: "module:Class.variable"."""

    def differences(self, package: str) -> Iterator[str]:
        """Yield what is not as known."""
        cls, known = resolve_name(f"{package}.{self.of}"), dict(_NAME.findall(self.names))
        there = {
            *dir(cls),
            *(name for base in getattr(cls, "__mro__", ()) for name in vars(base).get("__annotations__", ())),
        }
        for name, call in known.items():
            if name not in there and (call or not self.asked_by):
                yield f"{self.of}.{name} is missing"
            elif call:
                yield from _other_parameters(f"{self.of}.{name}", call[1:-1].split(), getattr(cls, name))
        if self.only:
            yield from (f"{self.of}.{name} is new" for name in sorted(there) if name[0] != "_" and name not in known)
        if self.asked_by:
            code, variable = self.asked_by.rsplit(".", 1)
            names = used(resolve_name(f"{package}.{code}"))
            asks = {name.partition(".")[2] for name in names if name.startswith(f"{variable}.")}
            yield from (f"{self.asked_by} is not asked for {name}" for name in sorted(known.keys() - asks))
            yield from (f"{self.asked_by} is asked for {name}" for name in sorted(asks - known.keys()))


@dataclass(frozen=True)
class Uses:
    """A function or a class, and what its code must use: names, or attributes of a variable as "variable.name"."""

    of: str
    names: str

    def differences(self, package: str) -> Iterator[str]:
        """Yield what is not as known."""
        there = used(resolve_name(f"{package}.{self.of}"))
        yield from (f"{self.of} does not use {name}" for name in self.names.split() if name not in there)


def used(thing: Any) -> set[str]:
    """Return the names that code uses, and each attribute with the name of what it is read from: "a.b"."""
    if isinstance(thing, type):
        return set().union(*(used(member) for member in vars(thing).values() if not isinstance(member, type)))
    for inner in ("fget", "__func__"):
        thing = getattr(thing, inner, thing)
    code = thing if isinstance(thing, CodeType) else getattr(inspect.unwrap(thing), "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    pairs = ((before.argval, step) for before, step in pairwise(steps) if step.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    names = {f"{of[-1] if isinstance(of, tuple) else of}.{step.argval}" for of, step in pairs}
    return names.union(code.co_names, *(used(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def difference(package: str, tested: str, known: Iterable[Has | Uses]) -> str | None:
    """Return the first difference between an engine and what is known of it, as a part of a sentence, or None."""
    try:
        version = resolve_name(f"{package}:__version__")
        if not _is_tested(version, tested):
            return f"version {version} was not tested, only {tested}"
        return next((found for one in known for found in one.differences(package)), None)
    except unless_interrupted(Exception) as error:  # whatever another version makes of our questions
        return f"{type(error).__name__}: {error}"


def _is_tested(version: str, tested: str) -> bool:
    return SpecifierSet(tested).contains(version, prereleases=True)


def _other_parameters(name: str, known: list[str], function: Any) -> Iterator[str]:
    found = [one for one in inspect.signature(function).parameters if one != "self"]
    more = known[-1:] == ["..."]
    names = [one.removesuffix("?") for one in known if one != "..." and (one[-1] != "?" or one[:-1] in found)]
    if (found[: len(names)] if more else found) != names:
        yield f"{name} has the parameters ({', '.join(found)}), not ({', '.join(known)})"


def main(
    package: str, tested: str, parts: Mapping[str, Iterable[Has | Uses]], arguments: list[str] | None = None
) -> int:
    """Print what is known of the engine in this environment, or of versions; return 1 if something differs, else 0."""
    parser = argparse.ArgumentParser(
        prog=f"python -m shmstore.integrations.{package}.compare",
        description=f"Compare the {package} in this environment with what the plug-in knows of it.",
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="only say whether these were tested")
    if versions := parser.parse_args(arguments).versions:
        rows = [(one, tested, None if _is_tested(one, tested) else "not tested") for one in versions]
    else:
        rows = [("version", tested, difference(package, tested, ()))]
        rows += [(part, one.of, difference(package, "", [one])) for part, known in parts.items() for one in known]
    print(f"| {package} | known | |\n|---|---|---|")
    for part, what, problem in rows:
        print(f"| {part} | {what} | {problem or 'as known'} |")
    return int(any(problem for *_, problem in rows))
