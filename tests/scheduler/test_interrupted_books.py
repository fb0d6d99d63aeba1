"""An interrupt (Ctrl-C, a timeout's signal) may come after any call in the books' Python, and leaves no half of a call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from shmstore.bindings import scheduler as native
from shmstore.scheduler import BlockHasher, Request, block_hasher
from shmstore.scheduler import request as requests
from tests.interrupts import interrupted_at

APPENDING = (requests.__file__, block_hasher.__file__, native.__file__)


def each_interrupt(files: tuple[str | None, ...], prepare: Callable[[], Any], action: Callable[[Any], Any]) -> list[Any]:
    """What `prepare` makes, once for each place where an interrupt can come into `action` on it."""
    left = []
    for number in count(1):
        about = prepare()
        if not interrupted_at(number, lambda about=about: action(about), *files):
            assert number > 1
            return left
        left.append(about)
    raise AssertionError


def test_tokens_whose_appending_is_interrupted_are_there_with_their_hashes_or_not_at_all() -> None:
    hasher = BlockHasher(4)
    for req in each_interrupt(
        APPENDING,
        lambda: Request("r", list(range(7)), block_hasher=hasher),
        lambda req: req.append_output_token_ids(7),
    ):
        req.append_output_token_ids([50] * 5)
        expected = Request("again", req.all_token_ids[:], block_hasher=hasher).block_hashes
        assert expected == req.block_hashes
