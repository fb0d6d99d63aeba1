"""An interrupt (Ctrl-C, a timeout's signal) may come behind any call in the books' Python: none is left half done."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from shmstore.bindings import blockhash, hashlist, kvcache
from shmstore.scheduler import (
    BlockHasher,
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    KVCacheManager,
    Request,
    RequestEncoderCacheManager,
    block_hasher,
    encoder_cache,
    kv_cache_manager,
)
from shmstore.scheduler import request as requests
from tests.interrupts import interrupted_at
from tests.scheduler.helpers import features, manager, request

APPENDING = (requests.__file__, block_hasher.__file__, blockhash.__file__, hashlist.__file__)

MANAGING = (kv_cache_manager.__file__, kvcache.__file__)


def each_interrupt(
    files: tuple[str | None, ...], prepare: Callable[[], Any], action: Callable[[Any], Any], exact: bool = False
) -> list[Any]:
    """What `prepare` makes, once for each place where an interrupt can come into `action` on it."""
    left = []
    for number in count(1):
        about = prepare()
        if not interrupted_at(number, lambda about=about: action(about), *files, exact=exact):
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


class WithItems:
    """A request of items, each of its content hash and size."""

    def __init__(self, request_id: str, *items: tuple[str, int]) -> None:
        self.request_id = request_id
        self.mm_features = features(*((name, 0, size) for name, size in items))

    def get_num_encoder_tokens(self, i: int) -> int:
        return self.mm_features[i].mm_position.length


A, B = WithItems("a", ("A", 4), ("B", 4), ("A", 4)), WithItems("b", ("A", 4), ("D", 7))
ENCODER = (encoder_cache.__file__,)


def shared_with(*requests: WithItems) -> EncoderCacheManager:
    """A cache in which A and B lie, of which these requests use what they have of it."""
    cache = EncoderCacheManager(10)
    for i in range(2):
        cache.allocate(A, i)
    cache.free(A)
    for req in requests:
        for i in range(len(req.mm_features)):
            cache.check_and_update_cache(req, i)
    return cache


@pytest.mark.parametrize(
    ("users", "action"),
    [
        ((), lambda cache: cache.check_and_update_cache(A, 0)),
        ((B,), lambda cache: cache.check_and_update_cache(A, 0)),
        ((), lambda cache: cache.allocate(B, 1)),
        ((A,), lambda cache: cache.free(A)),
        ((A, B), lambda cache: cache.free(A)),
    ],
)
def test_an_interrupted_call_leaves_an_encoder_cache_whole(
    users: tuple[WithItems, ...], action: Callable[[EncoderCacheManager], Any]
) -> None:
    for cache in each_interrupt(ENCODER, lambda: shared_with(*users), action, exact=True):
        cache.check_valid()
        action(cache)
        cache.check_valid()
        for req in (A, B):
            cache.free(req)
        assert 10 == cache.num_freeable_slots


@pytest.mark.parametrize("kind", [RequestEncoderCacheManager, EncoderDecoderCacheManager])
@pytest.mark.parametrize("action", ["allocate", "free"])
def test_an_interrupted_call_loses_no_room_of_a_cache_per_request(kind: type[Any], action: str) -> None:
    def cache_for_both() -> Any:
        cache = kind(20)
        cache.allocate(A, 0)
        cache.allocate(A, 1)
        return cache

    actions = {"allocate": lambda cache: cache.allocate(B, 1), "free": lambda cache: cache.free(A)}
    for cache in each_interrupt(ENCODER, cache_for_both, actions[action], exact=True):
        actions[action](cache)
        assert {"allocate": 20 - 8 - 7, "free": 20}[action] == cache.num_free_slots
        for req in (A, B):
            cache.free(req)
        assert 20 == cache.num_free_slots
