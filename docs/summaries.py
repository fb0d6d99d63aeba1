"""Writes the tables of `docs/reference/*.md`: each call with its contract, to be read where the pages are not built.

Run with ``python docs/summaries.py`` after a signature or a docstring has changed; a test compares.
"""

import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

REFERENCE = Path(__file__).resolve().parent / "reference"
PAGES = {
    "store.md": "shmstore",
    "serde.md": "shmstore.serde",
    "multimodal.md": "shmstore.multimodal",
    "tiers.md": "shmstore.tiers",
    "scheduler.md": "shmstore.scheduler",
    "metrics.md": "shmstore.metrics",
}
TABLE = re.compile(r"<!-- summary: begin -->\n.*?<!-- summary: end -->\n", re.DOTALL)


def first_sentence(thing: Any) -> str:
    """Return the docstring's first sentence, in one line that a table can hold."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("|", "\\|")


class _Name(str):
    """A default that has no literal: shown by this name, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shown(default: Any) -> Any:
    return _Name("...") if " object at 0x" in repr(default) else default


def signature(name: str, call: Any) -> str:
    """Return the call as its user writes it: parameters with their defaults, without types and self."""
    parameters = [
        parameter.replace(annotation=parameter.empty, default=_shown(parameter.default))
        for number, parameter in enumerate(inspect.signature(call).parameters.values())
        if number or parameter.name not in ("self", "cls")
    ]
    return f"{name}{inspect.Signature(parameters)}".replace("|", "\\|")


def members(cls: type) -> list[tuple[str, str]]:
    """Return what a class has of its own or inherits from this package, public and documented."""
    rows: list[tuple[str, str]] = []
    for name in dict.fromkeys(
        name for base in cls.__mro__ if base.__module__.startswith("shmstore") for name in vars(base)
    ):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
            rows.append((signature(f".{name}", getattr(cls, name)), first_sentence(getattr(cls, name))))
        elif isinstance(member, (property, cached_property)):
            rows.append((f".{name}", first_sentence(member)))
    return rows


def table(module: ModuleType) -> str:
    """Return the table of a module's public names, in the order of `__all__`; not of those of another page."""
    rows: list[tuple[str, str]] = []
    others = [other for other in PAGES.values() if len(other) > len(module.__name__)]
    for name in module.__all__:
        thing = getattr(module, name)
        if getattr(thing, "__module__", "").startswith(tuple(others)):
            continue
        if inspect.isfunction(thing):
            rows.append((signature(name, thing), first_sentence(thing)))
        elif inspect.isclass(thing) and not issubclass(thing, BaseException):
            rows.append((f"**{name}**", first_sentence(thing)))
            rows.extend(members(thing))
    lines = [f"| {call if call.startswith('**') else f'`{call}`'} | {says} |\n" for call, says in rows]
    return "".join(["<!-- summary: begin -->\n| | |\n|---|---|\n", *lines, "<!-- summary: end -->\n"])


def with_table(page: Path) -> str:
    """Return the page's text with its table as it should be."""
    text = page.read_text()
    if not TABLE.search(text):
        raise ValueError(f"{page}: no place for a table")
    return TABLE.sub(lambda _: table(importlib.import_module(PAGES[page.name])), text)


if __name__ == "__main__":
    for name in PAGES:
        page = REFERENCE / name
        page.write_text(with_table(page))
