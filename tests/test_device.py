"""Copies to a device: what they read stays in the store until they are done. A stand-in decides when that is."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import DeviceError, ObjectStoreReader, ObjectStoreWriter, PickleSerde, StoreClosedError
from shmstore import device as module
from shmstore.multimodal import MultiModalKwargsItems
from tests.multimodal.helpers import item
from tests.support import SHM, Stores, in_child, is_held, raises

KIB = 1 << 10
GPU = torch.device("cuda")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


class Event:
    def __init__(self, cuda: "Cuda") -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.copies = list(self.cuda.waiting)

    def query(self) -> bool:
        return not any(copy in self.cuda.waiting for copy in self.copies)

    def synchronize(self) -> None:
        self.cuda.waits += 1
        self.cuda.run()


class Cuda:
    """A device whose copies are made when `run` is called, from whatever is in the source's memory then."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.waits = 0
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []
        self.refused: tuple[int, ...] = ()
        self.room = 1000  # how many pieces it registers
        self.streams: list[Any] = []

    def is_available(self) -> bool:
        return True

    def Event(self) -> Event:  # noqa: N802 - torch's name
        return Event(self)

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def stream(self, stream: Any) -> Any:
        self.streams.append(stream)
        return nullcontext()

    def synchronize(self) -> None:
        self.run()

    def empty(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.full_like(source, 99)

    def copy(self, source: torch.Tensor, place: torch.Tensor) -> None:
        for start, nbytes in ((one.data_ptr(), one.nbytes) for one in (source, place)):
            inside = {start < at + size and at < start + nbytes for at, size, _ in self.registered}
            whole = any(at <= start and start + nbytes <= at + size for at, size, _ in self.registered)
            if True in inside and not whole:
                raise RuntimeError("CUDA error: invalid argument")
        self.waiting.append((place, source.data_ptr(), source.nbytes))

    def run(self) -> None:
        for there, address, nbytes in self.waiting:
            there.view(torch.uint8).view(-1).copy_(torch.tensor(list(ctypes.string_at(address, nbytes))))
        self.waiting = []

    def cudart(self) -> "Cuda":
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if flags in self.refused:
            return 801
        if len(self.registered) == self.room:
            return 2
        self.registered.append((address, nbytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.unregistered.append(address)
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    stand_in = Cuda()
    monkeypatch.setattr(module, "_cuda", lambda: stand_in)
    monkeypatch.setattr(module, "_empty", stand_in.empty)
    monkeypatch.setattr(module, "_copy", stand_in.copy)
    yield stand_in
    module.finish()


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    return stores.create(capacity=64 * KIB, n_readers=1)


@pytest.fixture
def reader(stores: Stores, writer: ObjectStoreWriter) -> ObjectStoreReader:
    return stores.attach(writer)


VALUE = {
    "pixels": torch.arange(4 * KIB, dtype=torch.int32).reshape(64, 64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "rest": [(1, "text"), None],
    "array": np.arange(5),
}


def check(found: Any) -> None:
    assert VALUE.keys() == found.keys()
    for key, expected in VALUE.items():
        if isinstance(expected, torch.Tensor):
            assert (expected.dtype, expected.shape) == (found[key].dtype, found[key].shape)
            assert torch.equal(expected, found[key])
        elif isinstance(expected, np.ndarray):
            assert np.array_equal(expected, found[key])
        else:
            assert expected == found[key]


def test_the_object_is_held_until_the_copy_is_done(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    found = reader.get(writer.put("a", VALUE), device=GPU)
    gc.collect()
    assert 99 == found["flags"].view(torch.uint8)[0], "the copy has not been made yet"
    module.release_done()
    assert is_held(writer)
    cuda.run()
    check(found)
    assert is_held(writer), "nobody has looked at the event"
    module.release_done()  # as the next copy does
    assert not is_held(writer)
    check(found)


def test_a_copy_goes_to_the_stream_that_was_given(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    reader.get(writer.put("a", VALUE), device="cuda", stream="side")
    reader.get(writer.get_cached("a"), device="cuda:0")
    assert ["side"] == cuda.streams


def test_close_waits_for_the_copies_and_unlocks_the_pages(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    assert 64 * KIB == reader.register_host_memory() == reader.register_host_memory()
    ((address, nbytes, flags),) = cuda.registered
    assert (64 * KIB, module._READ_ONLY, 0) == (nbytes, flags, address % 4096)
    found = reader.get(writer.put("a", VALUE), device=GPU)
    reader.close()
    check(found)
    assert ([address], 1) == (cuda.unregistered, cuda.waits)
    reader.close()
    assert [address] == cuda.unregistered
    assert not is_held(writer)
    with pytest.raises(StoreClosedError):
        ObjectStoreReader.register_host_memory(closed(writer))


def test_only_arenas_that_were_taken_are_locked_and_a_later_one_by_another_call(stores: Stores, cuda: Cuda) -> None:
    writer = stores.create(64 * KIB, n_writers=3, writes=False)
    blocks = (SHM / writer.name).stat().st_blocks
    reader = stores.attach(writer)
    assert 0 == reader.register_host_memory()
    starts = []
    for index in (2, 0):
        starts.append(stores.keep(ObjectStoreWriter.join(writer.name, index))._writer.data()[1])
        assert 64 * KIB * len(starts) == reader.register_host_memory() == reader.register_host_memory()
    assert starts[0] - starts[1] == cuda.registered[0][0] - cuda.registered[1][0] == 128 * KIB
    assert blocks * 512 + 128 * KIB == (SHM / writer.name).stat().st_blocks * 512
    reader.close()
    assert sorted(cuda.unregistered) == sorted(address for address, _, _ in cuda.registered)


def test_a_writer_locks_its_arena_and_a_copy_from_the_device_fills_what_it_has_begun(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    assert 64 * KIB == writer.register_host_memory() == writer.register_host_memory()
    assert [(64 * KIB, 0)] == [(nbytes, flags) for _, nbytes, flags in cuda.registered]  # the device writes to it
    begun = writer.begin("a", torch.zeros(4))
    there = torch.arange(4.0)
    event = module.download(there, begun.value)
    assert not event.query()
    event.synchronize()
    begun.commit()
    assert torch.equal(there, reader.get(writer.get_cached("a")))
    writer.close()
    assert [address for address, _, _ in cuda.registered] == cuda.unregistered
    cuda.refused = (0,)
    with (
        ObjectStoreWriter.create(capacity=64 * KIB, n_readers=1) as another,
        pytest.raises(DeviceError, match="801 without flags"),
    ):
        another.register_host_memory()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    assert module._PIECE == 1 << 30
    monkeypatch.setattr(module, "_PIECE", 16 * KIB)
    return 16 * KIB


def test_pages_are_locked_in_pieces_that_end_at_multiples_of_their_size(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda, small_pieces: int
) -> None:
    for one in (writer, reader):
        cuda.registered, cuda.unregistered = [], []
        assert 64 * KIB == one.register_host_memory()
        starts = [start for start, _, _ in cuda.registered]
        ends = [start + nbytes for start, nbytes, _ in cuda.registered]
        assert starts[1:] == ends[:-1]
        assert 64 * KIB == ends[-1] - starts[0]
        assert all(end % small_pieces == 0 for end in ends[:-1])
        assert all(nbytes <= small_pieces for _, nbytes, _ in cuda.registered)
        one.close()
        assert starts == sorted(cuda.unregistered)


def test_what_was_locked_is_unlocked_if_a_later_piece_is_refused(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda, small_pieces: int
) -> None:
    for one in (writer, reader):
        cuda.registered, cuda.unregistered, cuda.room = [], [], 2
        with raises(DeviceError, names=["2", str(small_pieces), str(64 * KIB)]):
            one.register_host_memory()
        assert [address for address, _, _ in cuda.registered] == sorted(cuda.unregistered)
        assert 2 == len(cuda.registered)
        cuda.room = 1000
        assert 64 * KIB == one.register_host_memory()


def test_no_copy_crosses_from_one_locked_piece_into_the_next(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda, small_pieces: int
) -> None:
    value = torch.arange(10 * KIB, dtype=torch.int32).reshape(10, KIB)
    for one in (writer, reader):
        one.register_host_memory()
    begun = writer.begin("a", value)
    event = module.download(value, begun.value)
    assert len(cuda.waiting) > 2
    event.synchronize()
    begun.commit()
    found = reader.get(writer.get_cached("a"), device=GPU)
    assert len(cuda.waiting) > 2
    views = MultiModalKwargsItems.from_seq([reader.get(writer.put("b", item(20 * KIB, 5)))]).get_data(device=GPU)
    cuda.run()
    assert torch.equal(value, found)
    assert torch.full((1, 20 * KIB), 5, dtype=torch.uint8).equal(views["pixels"])


def test_a_copy_of_rows_that_are_apart_is_one(cuda: Cuda, small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, place = torch.ones(10), torch.zeros(8 * KIB, 2)[:, 0]  # torch makes it through memory of its own
    copies: list[Any] = []
    monkeypatch.setattr(module, "_copy", lambda *both: copies.append(both))
    module.download(source, place)
    assert [(source, place)] == copies


def closed(writer: ObjectStoreWriter) -> ObjectStoreReader:
    with ObjectStoreReader.attach(writer.handle) as reader:
        return reader


def test_a_reader_that_is_garbage_waits_and_unlocks_its_pages(writer: ObjectStoreWriter, cuda: Cuda) -> None:
    reader = ObjectStoreReader.attach(writer.handle)
    reader.register_host_memory()
    found = reader.get(writer.put("a", VALUE), device=GPU)
    with pytest.warns(ResourceWarning):
        del reader
        gc.collect()
    check(found)
    assert 1 == len(cuda.unregistered)


def test_a_device_that_does_not_know_read_only_memory_is_asked_without(reader: ObjectStoreReader, cuda: Cuda) -> None:
    cuda.refused = (module._READ_ONLY,)
    reader.register_host_memory()
    assert [0] == [flags for _, _, flags in cuda.registered]


def test_an_error_while_a_copy_begins_keeps_nothing(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        module.finish()  # as at the exit of another thread
        raise ZeroDivisionError

    monkeypatch.setattr(cuda, "Event", fail)
    with pytest.raises(ZeroDivisionError):
        reader.get(writer.put("a", VALUE), device=GPU)
    gc.collect()
    assert [] == cuda.waiting, "the copy that had begun was waited for"
    assert not is_held(writer)


def test_a_forked_child_waits_for_no_copy_and_unlocks_no_page_of_its_parent(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    reader.register_host_memory()
    found = reader.get(writer.put("a", VALUE), device=GPU)

    def forget() -> tuple[int, int, int]:
        reader._registered[0].close()
        module.finish()
        return len(module._in_flight), cuda.waits, len(cuda.unregistered)

    assert (0, 0, 0) == in_child(forget)
    assert is_held(writer)
    cuda.run()
    check(found)


def test_items_that_are_joined_on_a_device_are_held_until_then(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, cuda: Cuda
) -> None:
    ref = writer.put("a", item(32 * KIB, 5))
    joined = MultiModalKwargsItems.from_seq([reader.get(ref)]).get_data(device=GPU)["pixels"]
    gc.collect()
    assert is_held(writer)
    cuda.run()
    module.release_done()
    assert not is_held(writer)
    assert isinstance(joined, torch.Tensor)
    assert torch.full((1, 32 * KIB), 5, dtype=torch.uint8).equal(joined)


def test_the_cpu_as_a_device_means_a_private_copy(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    found = reader.get(writer.put("a", VALUE), device="cpu")
    check(found)
    found["pixels"].zero_()
    assert not is_held(writer)


def test_another_serializer_is_refused_before_anything_is_acknowledged(stores: Stores, cuda: Cuda) -> None:
    writer = stores.create(capacity=64 * KIB, n_readers=1, serde=PickleSerde())
    reader = ObjectStoreReader.attach(writer.handle, serde=PickleSerde())
    ref = writer.put("a", VALUE)
    with raises(DeviceError, names=["PickleSerde"]):
        reader.get(ref, device=GPU)
    assert (1, 0) == (writer.stats().open_leases, reader.stats().gets)
    reader.close()


@needs_no_gpu
def test_without_cuda_one_typed_error_says_so_and_nothing_is_acknowledged(
    writer: ObjectStoreWriter, reader: ObjectStoreReader
) -> None:
    ref = writer.put("a", VALUE)
    for call in (reader.register_host_memory, lambda: reader.get(ref, device="cuda")):
        with raises(DeviceError, names=["CUDA"], hint=["torch.cuda.is_available()"]):
            call()
    for device in ("foo", "cuda:x", -1, 1.5):
        with raises(DeviceError, names=["device", repr(device)], hint=["cuda:0"]):
            reader.get(ref, device=device)  # type: ignore[arg-type]
    assert 0 == reader.stats().gets
    check(reader.get(ref))
