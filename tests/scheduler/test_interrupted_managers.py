"""An interrupt (Ctrl-C, a timeout's signal) behind any call in the managers' Python leaves no change half done."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shmstore.bindings import blockhash, hashlist, kvcache
from shmstore.scheduler import (
    BlockHasher,
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    KVCacheManager,
    Request,
    block_hasher,
    encoder_cache,
    kv_cache_manager,
)
from shmstore.scheduler import RequestEncoderCacheManager as PerRequest
from shmstore.scheduler import request as requests
from tests.interrupts import interrupted_at
from tests.scheduler.helpers import features, manager, request

MODULES = (block_hasher, blockhash, encoder_cache, hashlist, kv_cache_manager, kvcache, requests)
FILES = [module.__file__ for module in MODULES]
HASHER = BlockHasher(4)
OLD, NEW, NEXT = request("old", range(6)), request("new", range(9)), request("next", range(9))
A = Request("a", range(9), mm_features=features(("A", 0, 4), ("B", 0, 4), ("A", 0, 4)))
B = Request("b", range(9), mm_features=features(("A", 0, 4), ("D", 0, 7)))


def tables(*held: Request) -> KVCacheManager:
    made = manager(20, ("full", 4))
    assert all(made.allocate_slots(req, req.num_tokens) is not None for req in held)
    return made


def cache(kind: Any, *steps: tuple[str, Request, int]) -> Any:
    made = kind(20 if kind is not EncoderCacheManager else 10)
    for call, req, i in (("allocate", A, 0), ("allocate", A, 1), *steps):
        getattr(made, call)(req, i, *((100, 0) if call == "reserve" else ()))
    return made


UNUSED = (("free_encoder_input", A, 0), ("free_encoder_input", A, 1))
SHARED = (("allocate", A, 2), ("allocate", B, 0))
RESERVED = ("reserve", B, 1)
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "append": (lambda: Request("r", range(7), block_hasher=HASHER), lambda req: req.append_output_token_ids(7)),
    "allocate_slots": (lambda: tables(OLD), lambda made: made.allocate_slots(NEW, 9)),
    "free blocks": (lambda: tables(NEW, OLD), lambda made: made.free(NEW)),
    "use an unused entry": (lambda: cache(EncoderCacheManager, *UNUSED), lambda c: c.check_and_update_cache(A, 0)),
    "use a used entry": (lambda: cache(EncoderCacheManager), lambda c: c.check_and_update_cache(B, 0)),
    "evict": (lambda: cache(EncoderCacheManager, *UNUSED), lambda c: c.allocate(B, 1)),
    "free the only user": (lambda: cache(EncoderCacheManager, SHARED[0]), lambda c: c.free(A)),
    "free one of two": (lambda: cache(EncoderCacheManager, *SHARED), lambda c: c.free(A)),
    "reset": (lambda: cache(EncoderCacheManager, *SHARED), lambda c: c.reset()),
    "reserve by eviction": (lambda: cache(EncoderCacheManager, *UNUSED), lambda c: c.reserve(B, 1, 100, 0)),
    "reserve an entry": (lambda: cache(EncoderCacheManager, *UNUSED), lambda c: c.reserve(A, 0, 100, 0)),
    "allocate the reserved": (lambda: cache(EncoderCacheManager, *UNUSED, RESERVED), lambda c: c.allocate(B, 1)),
    "unreserve room": (lambda: cache(EncoderCacheManager, *UNUSED, RESERVED), lambda c: c.unreserve(B)),
    "unreserve an entry": (lambda: cache(EncoderCacheManager, *UNUSED, ("reserve", A, 0)), lambda c: c.free(A)),
    "reserve, not shared": (lambda: cache(EncoderDecoderCacheManager), lambda c: c.reserve(B, 1, 100, 0)),
    "allocate the reserved, not shared": (
        lambda: cache(EncoderDecoderCacheManager, RESERVED),
        lambda c: c.allocate(B, 1),
    ),
    "unreserve, not shared": (lambda: cache(EncoderDecoderCacheManager, RESERVED), lambda c: c.unreserve(B)),
    **{
        f"{call}, {kind.__name__}": (lambda kind=kind: cache(kind), action)  # type: ignore[misc]
        for kind in (PerRequest, EncoderDecoderCacheManager)
        for call, action in {"allocate": lambda c: c.allocate(B, 1), "free": lambda c: c.free(A)}.items()
    },
}


def check_whole(left: Any, action: Callable[[Any], Any]) -> None:
    if isinstance(left, Request):  # its tokens are there with their hashes, or not at all
        assert Request("again", left.all_token_ids[:], block_hasher=HASHER).block_hashes == left.block_hashes
    elif isinstance(left, KVCacheManager):  # no block is lost, and no table is another request's
        assert len(left.get_block_ids("new")[0]) in (0, 3)
        assert left.allocate_slots(NEXT, 9) is not None
        action(left)
        left.free(NEW)
        assert [2, 3, 5] == [
            *(len(left.get_block_ids(x)[0]) for x in ("old", "next")),
            len(left.block_pool.ref_counts()),
        ]
        left.check_valid()
    else:  # no room is lost
        for _ in range(2):
            getattr(left, "check_valid", int)()
            action(left)
        left.free(A)
        left.free(B)
        assert left.cache_size == getattr(left, "num_freeable_slots", left.num_free_slots)


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_call_leaves_everything_whole(name: str) -> None:
    (prepare, action), interrupted, number = CASES[name], True, 0
    while interrupted:
        left, number = prepare(), number + 1
        interrupted = interrupted_at(number, partial(action, left), *FILES)
        check_whole(left, action)
    assert number > 2
