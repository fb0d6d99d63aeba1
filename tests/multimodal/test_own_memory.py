"""An item that is a view into a batch is kept and sent without the rest of the batch."""

import pickle
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmstore.multimodal import (
    MirroredProcessingCache,
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from shmstore.multimodal.values.items import own_memory
from tests.multimodal.helpers import GIB, config, item, shm_sender

BYTES = 1000
Pair = namedtuple("Pair", "first second")


def of_a_batch() -> Any:
    inputs = {"pixels": torch.arange(32 * BYTES // 2, dtype=torch.int16).reshape(32, -1)}
    return MultiModalKwargsItems.from_hf_inputs(inputs, {"pixels": MultiModalFieldConfig.batched("image")})["image"]


def kept(found: Any) -> int:
    return int(found["pixels"].data.untyped_storage().nbytes())


def holding(data: object) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", data, MultiModalBatchedField())])


def sender(cache: Any, given: list[Any]) -> list[Any]:
    return [sent for sent, _ in cache.get_and_update([(one, []) for one in given], hashes(given))]


def hashes(given: list[Any]) -> list[str]:
    return [str(n) for n in range(len(given))]


MODES = {
    "only": (MultiModalProcessorOnlyCache, sender),
    "sender": (MultiModalProcessorSenderCache, sender),
    "receiver": (MultiModalReceiverCache, lambda cache, given: cache.get_and_update(given, hashes(given))),
    "mirrored p0": (
        MirroredProcessingCache,
        lambda cache, given: cache.get_and_update_p0(given, hashes(given)),
    ),
    "mirrored p1": (
        MirroredProcessingCache,
        lambda cache, given: cache.get_and_update_p1(given, hashes(given)),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_an_item_of_a_batch_comes_out_with_its_own_bytes_alone(mode: str) -> None:
    make, exchange = MODES[mode]
    given = of_a_batch()[:3]
    out = exchange(make(config(GIB)), given)
    assert given == out
    assert [BYTES] * 3 == [kept(one) for one in out]
    assert len(pickle.dumps(out[0], 5)) < 2 * BYTES


@pytest.mark.parametrize("mode", MODES)
def test_no_cache_keeps_the_array_from_which_a_tensor_was_cut(mode: str) -> None:
    make, exchange = MODES[mode]
    whole = np.zeros(BYTES * 1000, np.uint8)
    alive = weakref.ref(whole)
    cache = make(config(GIB))
    exchange(cache, [holding(torch.from_numpy(whole[:BYTES]))])
    del whole
    assert alive() is None


def test_an_item_of_a_batch_that_goes_inline_is_pickled_without_the_batch() -> None:
    items = of_a_batch()
    with shm_sender(config(4096, BYTES // 2, cache_type="shm")) as cache:
        for given in ([items[0]], items[1:3]):
            sent = sender(cache, given)
            assert given == sent
            assert all(len(pickle.dumps(one, 5)) < 2 * BYTES for one in sent)
        mine = item(BYTES)
        assert mine is sender(cache, [mine])[0]


def test_the_memory_kept_alive_is_the_memory_counted() -> None:
    only, receiver = MultiModalProcessorOnlyCache(config(4 * BYTES)), MultiModalReceiverCache(config(4 * BYTES))
    mirrored = MirroredProcessingCache(config(4 * BYTES))
    for n in range(6):
        one = of_a_batch()[0]
        only.get_and_update([(one, [])], [str(n)])
        mirrored.get_and_update_p0([one], [str(n)])
        receiver.get_and_update([one], [str(n)])
    stored = only._kept
    assert 4 * BYTES == sum(kept(one) for (one, _), _ in stored.entries.values()) == stored.nbytes
    assert 4 * BYTES == sum(kept(one) for one, _ in receiver._guard.held().entries.values()) == receiver.nbytes
    assert [BYTES] * 4 == [kept(one) for one, _ in mirrored._p0._guard.held().entries.values()]


class Foreign:
    """The owner of memory of which nobody can say how large it is."""

    whole = np.arange(8)
    __array_interface__ = whole.__array_interface__


def view_of_bytes() -> NDArray[Any]:
    return np.frombuffer(bytearray(100), np.uint8)[:10]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(10.0)[::2],
        lambda: torch.arange(10, dtype=torch.bfloat16).reshape(2, 5).T[:2],
        lambda: torch.zeros(9)[:0],
        lambda: [torch.zeros(3), (torch.arange(9)[3:], "text")],
        lambda: Pair(torch.zeros(3), torch.arange(9)[3:]),
        lambda: {"a": 1, "b": torch.arange(9)[3:]},
        lambda: np.arange(10.0)[::2],
        lambda: np.arange(12).reshape(3, 4)[1:, 1:].T,
        view_of_bytes,
        lambda: torch.from_numpy(np.arange(100)[:9]),
        lambda: torch.as_tensor(np.arange(100)[:9]),
        lambda: torch.utils.dlpack.from_dlpack(np.arange(100)[:9]),
        lambda: torch.frombuffer(bytearray(100), dtype=torch.uint8, count=9),
        lambda: torch.from_numpy(np.arange(100)[:9]).numpy(),
        lambda: np.from_dlpack(torch.arange(100)[:9]),
        lambda: np.frombuffer(memoryview(bytearray(100))[:9], np.uint8),
        lambda: np.asarray(Foreign()),
        lambda: torch.arange(9).numpy()[2:],
        lambda: torch.arange(9)[2:].numpy(),
    ],
)
def test_a_copy_equals_the_view_and_shares_nothing_with_it(make: Callable[..., Any]) -> None:
    given = holding(make())
    alone = own_memory(given)
    assert given == alone
    assert type(given["k"].data) is type(alone["k"].data)
    assert alone is not given
    assert own_memory(alone) is alone


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(9),
        lambda: torch.arange(6).reshape(2, 3).T,
        lambda: torch.eye(3).to_sparse(),
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: np.frombuffer(bytearray(100), np.uint8),
        lambda: [torch.zeros(3), 5, None, "text"],
    ],
)
def test_what_keeps_no_more_alive_than_itself_is_left_alone(make: Callable[..., Any]) -> None:
    given = holding(make())
    assert own_memory(given) is given
