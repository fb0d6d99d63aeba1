"""An interrupt (Ctrl-C, a timeout's signal) may come after any call in the books' Python, and leaves no half of a call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from shmstore.bindings import scheduler as native
from shmstore.scheduler import BlockHasher, KVCacheManager, Request, block_hasher, kv_cache_manager
from shmstore.scheduler import request as requests
from tests.interrupts import interrupted_at
from tests.scheduler.helpers import manager, request

APPENDING = (requests.__file__, block_hasher.__file__, native.__file__)

MANAGING = (kv_cache_manager.__file__, native.__file__)


def each_interrupt(
    files: tuple[str | None, ...], prepare: Callable[[], Any], action: Callable[[Any], Any]
) -> list[Any]:
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


def books_with(held: Request, *others: Request) -> KVCacheManager:
    books = manager(20, ("full", 4))
    for req in (*others, held):
        assert books.allocate_slots(req, req.num_tokens) is not None
    return books


def test_blocks_whose_allocation_is_interrupted_are_found_by_free() -> None:
    old, new = request("old", range(6)), request("new", range(9))
    for books in each_interrupt(MANAGING, lambda: books_with(old), lambda books: books.allocate_slots(new, 9)):
        books.check_valid()
        assert [1, 2] == books.get_block_ids("old")[0]
        books.free(new)
        assert {1: 1, 2: 1} == books.block_pool.ref_counts()
        assert books.allocate_slots(new, 9) is not None
        assert 3 == len(books.get_block_ids("new")[0])


def test_a_free_that_is_interrupted_gives_all_blocks_back_or_none_and_may_be_repeated() -> None:
    old, new, next_one = (request(name, range(9)) for name in ("old", "new", "next"))
    seen = set()
    for books in each_interrupt(MANAGING, lambda: books_with(new, old), lambda books: books.free(new)):
        books.check_valid()
        seen.add(books.get_block_ids("new")[0] == [])
        assert books.get_num_common_prefix_blocks("new") is not None
        assert books.allocate_slots(next_one, 9) is not None  # takes the handle that has ended, if one has
        books.free(new)
        assert [[], 3, 3] == [books.get_block_ids("new")[0], *(len(books.get_block_ids(n)[0]) for n in ("old", "next"))]
        assert 6 == len(books.block_pool.ref_counts())
    assert {True, False} == seen
