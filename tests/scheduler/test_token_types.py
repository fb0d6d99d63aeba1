"""Which tokens a request takes: integers of any type, kept as Python's own; anything else is refused at once."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmstore.scheduler import BlockHasher, Request
from shmstore.scheduler.events import KVCacheEvent
from tests.scheduler.helpers import admit, manager, request


class Token(enum.IntEnum):
    A = 1


@pytest.mark.parametrize("make", [list, np.array])
def test_tokens_of_a_request_of_ones_own_are_told_as_the_numbers_they_are(make: Any) -> None:
    kv, plain = manager(20, ("full", 4), enable_kv_cache_events=True), request("a", range(9))
    own: Any = types.SimpleNamespace(
        request_id="own", num_computed_tokens=0, num_preemptions=0, skip_reading_prefix_cache=False, num_tokens=9,
        all_token_ids=make([np.int64(i) for i in range(9)]), block_hashes=plain.block_hashes[:], lora_id=np.int32(3),
    )  # fmt: skip
    assert (0, ([1, 2, 3],)) == admit(kv, own)
    (event,) = kv.take_events()
    assert ["BlockStored", plain.block_hashes[:], None, list(range(8)), 4, 3, "GPU", 0] == KVCacheEvent.from_msgpack(
        event.to_msgpack()
    ).to_list()
    assert 8 == kv.get_computed_blocks(plain)[1]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (-(2**63), [-(2**63)]),
        (np.array(5), [5]),
        (torch.tensor([5, 6, 7]), [5, 6, 7]),
        (np.arange(9, dtype=np.uint64), [*range(9)]),
        ((token for token in (np.int32(5), 6)), [5, 6]),
        ([False, Token.A, *torch.arange(2, 9)], [*range(9)]),
        ([], []),
    ],
)
def test_tokens_of_any_integer_type_are_kept_as_plain_integers(given: Any, want: list[int]) -> None:
    req = request("a", [1, 2, 3])
    req.append_output_token_ids(given)
    assert want == req.output_token_ids
    assert {int} == set(map(type, req.all_token_ids))
    prompt: Any = np.array([1, 2, 3, *want])
    assert request("b", prompt).block_hashes == req.block_hashes


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (["x"], TypeError, r"token_ids\[0\] must be an integer, not 'x'"),
        ([1, "x"], TypeError, r"token_ids\[1\] must be an integer, not 'x'"),
        ([1, 2, np.uint8(2), 1.5], TypeError, r"token_ids\[3\] must be an integer, not 1\.5"),
        (torch.tensor([[1, 2]]), TypeError, r"token_ids\[0\] must be an integer, not \[1, 2\]"),
        ([1, 2**63], ValueError, r"token_ids\[1\] must be an integer of at most 64 bits"),
        (object, TypeError, "must be a sequence of integers"),
    ],
)
def test_what_is_no_token_is_refused_at_once_by_its_position(tokens: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Request("e", tokens)
    req = request("a", [1, 2, 3, 4])
    with pytest.raises(error, match=message):
        req.append_output_token_ids(tokens)
    assert (4, 1) == (req.num_tokens, len(req.block_hashes))


def broken_half_way(first: Any) -> Iterator[Any]:
    yield first
    raise OSError("no more")


@pytest.mark.parametrize(
    ("error", "tokens", "answer"),
    [
        (OSError, lambda: broken_half_way(1), lambda: []),
        (TypeError, lambda: 1, lambda: 7),
        (OSError, lambda: 1, lambda: broken_half_way(b"x" * 32)),
        (OSError, lambda: 1, lambda: [*broken_half_way(1)]),
        (TypeError, lambda: 1, lambda: [b"x" * 32, 5]),
    ],
)
def test_appending_tokens_that_cannot_be_hashed_appends_none(error: type[Exception], tokens: Any, answer: Any) -> None:
    hasher = BlockHasher(4)
    req = Request("r", range(8), block_hasher=lambda req: hasher(req) if req.num_tokens <= 8 else answer())
    if error is OSError:
        req.block_hashes = list(req.block_hashes)  # type: ignore[assignment]
    before = (req.all_token_ids[:], list(req.block_hashes))
    with pytest.raises(error):
        req.append_output_token_ids(tokens())
    assert before == (req.all_token_ids[:], list(req.block_hashes))
