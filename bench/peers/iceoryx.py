"""iceoryx2: a publisher of byte slices that are loaned, filled and sent, and its events to wake the subscribers."""

import ctypes
import os
import pickle
import struct
from typing import Any

import iceoryx2 as iox2

from bench.peers.interface import Arrays, Packed, Receiver, SpawnedPeer, Tree, arrays, unpacked

iox2.set_log_level(iox2.LogLevel.Error)

_HEAD = 512  # bytes before the tensors: the length of what describes them, and that
_LENGTH = struct.Struct("<I")


def _services(node: Any, name: str, n_readers: int) -> tuple[Any, Any]:
    objects = (
        node.service_builder(iox2.ServiceName.new(name))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .payload_alignment(iox2.Alignment.new(64))
        .max_publishers(1)
        .max_subscribers(n_readers)
        .subscriber_max_buffer_size(2)
        .subscriber_max_borrowed_samples(2)
        .open_or_create()
    )
    return objects, node.service_builder(iox2.ServiceName.new(name)).event().open_or_create()


def _block(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


class _Reader(Receiver):
    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        name, n_readers, self._nbytes = ticket
        self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        objects, events = _services(self._node, name, n_readers)
        self._subscriber = objects.subscriber_builder().create()
        self._listener = events.listener_builder().create()
        self._sample: Any = None

    def receive(self) -> Tree | None:
        self._listener.blocking_wait()
        self._sample = self._subscriber.receive()
        if self._sample is None:
            return None
        block = _block(self._sample.payload_ptr, self._nbytes)
        (length,) = _LENGTH.unpack_from(block)
        return unpacked(pickle.loads(block[_LENGTH.size : _LENGTH.size + length]), block[_HEAD:])

    def release_all(self) -> None:
        self._sample.delete()
        self._sample = None

    def close(self) -> None:
        for port in (self._subscriber, self._listener):
            port.delete()


class Iceoryx(SpawnedPeer):
    """Zero copy in both directions; the tensors are copied in, as they come from elsewhere."""

    title = "iceoryx2"
    name = "iceoryx2"
    package = "iceoryx2"
    how = (
        "A loaned sample filled and sent, an event to each subscriber. "
        "There is no store: a hit is loaned, filled and sent again."
    )
    ahead = (
        "Most of a small object's time is the waking of readers. Native code of iceoryx2 does that, and the common "
        "pipe is Python's. There is no key to look up and no lease to open."
    )
    receiver = _Reader

    def begin(self, nbytes: int, n_readers: int) -> tuple[str, int, int]:
        name = f"shmstore-bench/{os.getpid()}/{nbytes}/{n_readers}"
        self._size = _HEAD + nbytes + 3 * 64
        self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        objects, events = _services(self._node, name, n_readers)
        self._publisher = objects.publisher_builder().initial_max_slice_len(self._size).max_loaned_samples(2).create()
        self._notifier = events.notifier_builder().create()
        self._last: Any = None
        return name, n_readers, self._size

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        packed = Packed(value)
        sample = self._publisher.loan_slice_uninit(self._size)
        block = _block(sample.payload_ptr, self._size)
        fields = pickle.dumps(packed.fields)
        block[: _LENGTH.size + len(fields)] = _LENGTH.pack(len(fields)) + fields
        packed.write(block[_HEAD:], value)
        sample.assume_init().send()
        self._notifier.notify()
        self._last = value

    def send_again(self) -> None:
        self.send(0, self._last)

    def end(self) -> None:
        self._notifier.notify()  # without a sample

    def release(self) -> None:
        for port in (self._publisher, self._notifier):
            port.delete()
        self._last = None
