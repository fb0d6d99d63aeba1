"""How long an object stays: as long as anything shares its storage, on whatever path, and not a put longer."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import (
    MsgpackSerde,
    ObjectStoreWriter,
    StoreClosedError,
    TensorSpec,
    WriterActiveError,
)
from tests.support import Stores, bits, crowd, in_child, is_held, is_mapped

CAPACITY = 64 * 1024
NUMBERS = torch.arange(1024, dtype=torch.float32).reshape(32, 32)


class Module(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("twice", weight.view(2, 512))


DLPACK: Any = torch.utils.dlpack  # has no type for `to_dlpack`
# Ways from a view to something else that shares its storage, and what that holds.
PATHS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "slice": (lambda t: t[3:5], NUMBERS[3:5]),
    "buffer of a module": (lambda t: Module(t).twice, NUMBERS),
    "array interface": (lambda t: torch.as_tensor(np.asarray(t.numpy())), NUMBERS),
    "memoryview": (lambda t: t.numpy().data, NUMBERS),
    "dlpack capsule": (lambda t: DLPACK.from_dlpack(DLPACK.to_dlpack(t[4:])), NUMBERS[4:]),
    "storage": (lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (1024,), (1,)), NUMBERS),
    "closure": (lambda t: lambda: t[2], NUMBERS[2]),
}


def content(thing: Any) -> bytes:
    if callable(thing) and not isinstance(thing, torch.Tensor):
        thing = thing()
    return thing.tobytes() if isinstance(thing, memoryview) else bits(thing)


@pytest.mark.parametrize("private", [False, True], ids=["view", "private"])
@pytest.mark.parametrize("name", PATHS)
def test_whatever_shares_the_storage_keeps_the_object_and_lets_it_go(stores: Stores, name: str, private: bool) -> None:
    path, expected = PATHS[name]
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    kept = path(reader.get(writer.put("k", NUMBERS), private=private))
    assert 1 == reader.stats().live_views
    crowd(writer)
    assert "k" in writer
    assert is_held(writer)
    assert bits(expected) == content(kept)
    del kept
    assert 0 == reader.stats().live_views, "something went on holding it"
    assert not is_held(writer)


def test_a_view_in_a_cycle_goes_when_the_cycle_is_collected(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    gc.disable()
    try:
        cycle: dict[str, Any] = {"view": reader.get(writer.put("k", NUMBERS))[2:]}
        cycle["self"] = cycle
        seen = weakref.ref(cycle["view"])
        del cycle
        assert is_held(writer)
        assert seen() is not None
        gc.collect()
        assert (None, False) == (seen(), is_held(writer))
    finally:
        gc.enable()


@pytest.mark.parametrize("private", [False, True], ids=["view", "private"])
@pytest.mark.parametrize("value", [torch.empty(0, 3), "text", [None, (1,)]])
def test_a_value_without_bytes_holds_nothing(stores: Stores, value: Any, private: bool) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    kept = reader.get(writer.put("k", value), private=private)
    assert type(value) is type(kept)
    assert not is_held(writer)


# ---- close


@pytest.mark.parametrize("deletes", [False, True])
def test_reserved_views_that_are_kept_do_not_crash_after_close(name: str, deletes: bool) -> None:
    def keep_and_write() -> int:
        writer = ObjectStoreWriter.create(name, capacity=CAPACITY, n_readers=1)
        template = {"t": TensorSpec((100,), torch.uint8), "a": TensorSpec((50,), np.dtype(np.int16))}
        with writer.reserve("k", template) as views:
            kept_t, kept_a = views["t"][5:], views["a"]
        writer.close()
        if deletes:
            del writer
        gc.collect()
        kept_t.fill_(7)  # not allowed, and no reason to crash
        kept_a[:] = 3
        return int(kept_t.sum()) + int(kept_a.sum())

    assert 95 * 7 + 150 == in_child(keep_and_write)


def test_a_writer_closed_inside_a_reservation_gives_no_successor_its_bytes(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    writer.put("a", 1)
    with pytest.raises(StoreClosedError), writer.reserve("k", TensorSpec((1000,), torch.uint8)) as view:
        with pytest.raises(StoreClosedError), writer.reserve("other", TensorSpec((1000,), torch.uint8)):
            writer.close(unlink=False)
        with pytest.raises(WriterActiveError):
            ObjectStoreWriter.recover(writer.handle)
        view.fill_(7)
    again = stores.recover(writer.handle)
    assert (["a"], 1) == (again.keys(), again.stats().objects)
    again.check_valid()


def test_a_writer_closed_while_a_put_is_copying_gives_no_successor_its_bytes(stores: Stores) -> None:
    class Closing(MsgpackSerde):
        def fill(self, dst: Any, source: Any) -> None:
            writer.close(unlink=False)
            with pytest.raises(WriterActiveError):
                ObjectStoreWriter.recover(writer.handle)
            super().fill(dst, source)

    writer = stores.create(CAPACITY, serde=Closing())
    writer.put("a", 1)
    with pytest.raises(StoreClosedError):
        writer.put("k", NUMBERS.T)
    again = stores.recover(writer.handle)
    assert (["a"], 1) == (again.keys(), again.stats().objects)


# ---- the mapping


@pytest.mark.parametrize("kept", [False, True])
def test_only_a_view_keeps_the_mapping_of_what_is_closed(stores: Stores, kept: bool) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    view = reader.get(writer.put("k", np.arange(9)))
    if not kept:
        del view
    reader.close()
    assert is_mapped(writer.name)
    writer.close()
    assert kept == is_mapped(writer.name)
    if kept:
        assert list(range(9)) == view.tolist()
        del view
        assert not is_mapped(writer.name)


def test_what_is_being_filled_keeps_the_mapping_of_a_closed_writer(stores: Stores) -> None:
    writer = stores.create(64 * 1024)
    with pytest.raises(StoreClosedError), writer.reserve("k", np.zeros(9, np.uint8)) as array:
        writer.close()
        array[:] = 7
    assert is_mapped(writer.name)
    assert [7] * 9 == array.tolist()
    del array
    gc.collect()
    assert not is_mapped(writer.name)
