"""Which tokens a request takes: integers of any type, kept as Python's own; anything else is refused at once."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmstore.scheduler import BlockHasher, BlockStored, KVCacheManager, Request
from shmstore.scheduler.events import KVCacheEvent
from tests.scheduler.helpers import admit, manager, request


class Token(enum.IntEnum):
    A = 1


def manager_with_events() -> KVCacheManager:
    return manager(20, ("full", 4), enable_kv_cache_events=True)


def stored(kv: KVCacheManager) -> BlockStored:
    (event,) = kv.take_events()
    assert isinstance(event, BlockStored)
    return event


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(i) for i in range(9)],
        [0, 1, *torch.arange(2, 9)],
        torch.arange(9),
        np.arange(9, dtype=np.uint64),
        range(9),
        [False, Token.A, *range(2, 9)],
    ],
)
def test_a_prompt_of_any_integer_type_is_told_as_plain_integers(prompt: Any) -> None:
    kv, req = manager_with_events(), request("a", prompt)
    admit(kv, req)
    event = stored(kv)
    assert (list(range(8)), {int}) == (event.token_ids, set(map(type, event.token_ids)))
    assert event == KVCacheEvent.from_msgpack(event.to_msgpack())
    assert {int} == set(map(type, req.all_token_ids))
    assert request("b", list(range(9))).block_hashes == req.block_hashes


@pytest.mark.parametrize("make", [list, np.array])
def test_tokens_of_a_request_of_ones_own_are_told_as_the_numbers_they_are(make: Any) -> None:
    kv, plain = manager_with_events(), request("a", range(8))
    own = types.SimpleNamespace(
        request_id="own", num_computed_tokens=0, num_preemptions=0, skip_reading_prefix_cache=False, num_tokens=8,
        all_token_ids=make([np.int64(i) for i in range(8)]), block_hashes=plain.block_hashes[:], lora_id=np.int32(3),
    )  # fmt: skip
    assert kv.allocate_slots(own, 8) is not None
    (event,) = kv.take_events()
    assert ["BlockStored", plain.block_hashes[:], None, list(range(8)), 4, 3, "GPU", 0] == KVCacheEvent.from_msgpack(
        event.to_msgpack()
    ).to_list()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (5, [5]),
        (-(2**63), [-(2**63)]),
        (np.array(5), [5]),
        (Token.A, [1]),
        (torch.tensor([5, 6, 7]), [5, 6, 7]),
        ([np.int32(5), torch.tensor(6), 7], [5, 6, 7]),
        ((token for token in (5, 6)), [5, 6]),
        ([], []),
    ],
)
def test_generated_tokens_of_any_integer_type_are_kept_as_plain_integers(given: Any, want: list[int]) -> None:
    req = request("a", [1, 2, 3])
    req.append_output_token_ids(given)
    assert want == req.output_token_ids
    assert {int} == set(map(type, req.all_token_ids))


BAD: list[tuple[Any, type[Exception], str]] = [
    (["x"], TypeError, r"\[0\] must be an integer, not 'x'"),
    ([1, 300, np.uint8(2), 1.5], TypeError, r"\[3\] must be an integer, not 1\.5"),
    ([1, 2, None], TypeError, r"\[2\] must be an integer, not None"),
    ("ab", TypeError, r"\[0\] must be an integer, not 'a'"),
    (np.array([1.0, 2.0]), TypeError, r"\[0\] must be an integer, not 1\.0"),
    ([1, torch.tensor(2.5)], TypeError, r"\[1\] must be an integer, not tensor"),
    (torch.tensor([[1, 2]]), TypeError, r"\[0\] must be an integer, not \[1, 2\]"),
    ([1, 2**63], ValueError, r"\[1\] must be an integer of at most 64 bits"),
    ([1, object()], TypeError, r"\[1\] must be an integer, not <object"),
    (object, TypeError, "must be a sequence of integers"),
]


@pytest.mark.parametrize("hasher", [None, BlockHasher(4)])
@pytest.mark.parametrize(("tokens", "error", "message"), BAD)
def test_what_is_no_token_is_refused_at_once_by_its_position(
    tokens: Any, error: type[Exception], message: str, hasher: Any
) -> None:
    with pytest.raises(error, match=rf"prompt_token_ids{message}" if message[0] == "\\" else message):
        Request("e", tokens, block_hasher=hasher)
    req = Request("a", [1, 2, 3], block_hasher=hasher)
    before = (req.all_token_ids[:], list(req.block_hashes))
    with pytest.raises(error, match=rf"token_ids{message}" if message[0] == "\\" else message):
        req.append_output_token_ids(tokens)
    assert before == (req.all_token_ids[:], list(req.block_hashes))


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=np.int64), torch.tensor([], dtype=torch.int64)])
def test_a_request_without_a_token_is_refused(empty: Any) -> None:
    with pytest.raises(ValueError, match="at least one token, and prompt_token_ids is empty"):
        Request("e", empty)


def failing_hasher(wrong: Any) -> Callable[[Any], Any]:
    """A hasher whose answer for more than 8 tokens is `wrong`, or is what a call of it gives or raises."""
    hasher = BlockHasher(4)
    return lambda req: hasher(req) if req.num_tokens <= 8 else wrong() if callable(wrong) else wrong


def broken_half_way(first: Any = 1, error: BaseException = OSError("no more")) -> Any:  # noqa: B008
    yield first
    raise error


@pytest.mark.parametrize("own_list", [False, True])
@pytest.mark.parametrize(
    ("error", "tokens", "hasher"),
    [
        (OSError, broken_half_way, BlockHasher(4)),
        (TypeError, lambda: [1, 2], failing_hasher(7)),
        (OSError, lambda: [1, 2], failing_hasher(lambda: broken_half_way(b"x" * 32))),
        (OSError, lambda: 1, failing_hasher(lambda: [*broken_half_way()])),
        (KeyboardInterrupt, lambda: 1, failing_hasher(lambda: [*broken_half_way(1, KeyboardInterrupt())])),
    ],
)
def test_appending_tokens_that_cannot_be_hashed_appends_none(
    error: type[BaseException], tokens: Any, hasher: Any, own_list: bool
) -> None:
    req = Request("r", range(7), block_hasher=hasher)
    if own_list:
        req.block_hashes = list(req.block_hashes)  # type: ignore[assignment]
    req.append_output_token_ids(7)
    before = (req.all_token_ids[:], list(req.block_hashes))
    with pytest.raises(error):
        req.append_output_token_ids(tokens())
    assert before == (req.all_token_ids[:], list(req.block_hashes))
    assert (8, 1) == (req.num_tokens, req.num_output_tokens)


def test_a_hash_among_others_that_is_none_takes_its_tokens_back_too() -> None:
    req = Request("r", range(8), block_hasher=failing_hasher([b"x" * 32, 5]))
    before = (req.num_tokens, req.block_hashes[:])
    with pytest.raises(TypeError):
        req.append_output_token_ids([1, 2])
    assert before == (req.num_tokens, req.block_hashes[:])
