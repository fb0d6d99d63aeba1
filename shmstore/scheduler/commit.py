"""The one way in which the managers written in Python change what they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import starmap
from operator import call
from typing import Any

__all__ = ["commit"]


def commit(changes: Iterable[tuple[Any, ...]]) -> None:
    """Make all changes, each a builtin function and its arguments, in one call into C.

    Python runs the handlers of signals between its own steps only. An exception that one raises finds all of the
    changes made, or none.
    """
    deque(starmap(call, changes), 0)
