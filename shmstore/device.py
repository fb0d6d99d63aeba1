"""Copies from host memory to a GPU: what they read stays alive until they are done.

torch knows when its own page-locked memory may be reused. It does not know this of a store's memory, whose bytes the
writer may reuse as soon as no view is left. So each copy is recorded here with its source and an event after it, and
the source is dropped after the event has come: at the next call here, or when a reader is closed.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shmstore.errors import DeviceError, shown
from shmstore.serde.tensors import load_torch

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 30
"""Bytes that a call locks at most: one for 100 GiB fails on some hosts, and other processes wait for it meanwhile."""
_READ_ONLY = 8  # cudaHostRegisterReadOnly: the device needs it for pages that this process may not write


class _Copy:
    """A copy in flight."""

    __slots__ = ("event", "source")

    def __init__(self, source: "torch.Tensor") -> None:
        self.source = source
        self.event: Any = None


_in_flight: set[_Copy] = set()  # without a lock: each change is one operation
os.register_at_fork(after_in_child=_in_flight.clear)  # they are the parent's, and CUDA does not survive a fork


def _cuda() -> Any:  # tests have a stand-in
    return load_torch().cuda


def device_of(device: "torch.device | str") -> "torch.device":
    """Return the device; DeviceError if torch knows none of that name."""
    try:
        found: torch.device = load_torch().device(device)
        return found
    except (RuntimeError, TypeError):
        hint = "pass a torch.device or its name, such as 'cuda:0'"
        raise DeviceError(f"device must be one that torch knows, not {shown(device)}", hint=hint) from None


def require_cuda() -> None:
    """Raise DeviceError if this process cannot use CUDA."""
    if not _cuda().is_available():
        raise DeviceError


def upload(source: "torch.Tensor", device: "torch.device", stream: Any = None) -> "torch.Tensor":
    """Copy a host tensor to a CUDA device, on `stream` or the current one, and keep it until the copy is done.

    Returns at once if the memory is page-locked. Work on the same stream sees the copy; other streams must wait for it.
    """
    release_done()
    cuda, copy = _cuda(), _Copy(source)
    _in_flight.add(copy)  # before the copy begins, so that an interrupt leaves the source alive
    try:
        with cuda.device(device), nullcontext() if stream is None else cuda.stream(stream):
            there = _empty(source, device)
            for one, place in _cut(source, there, source):
                _copy(one, place)
            event = cuda.Event()
            event.record()
            copy.event = event
            return there
    except BaseException:
        cuda.synchronize()
        _in_flight.discard(copy)
        raise


def _empty(source: "torch.Tensor", device: "torch.device") -> "torch.Tensor":  # tests have stand-ins for both
    there: torch.Tensor = load_torch().empty_like(source, device=device)
    return there


def _copy(source: "torch.Tensor", place: "torch.Tensor") -> None:
    place.copy_(source, non_blocking=True)


def _pieces(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece that a call locks starts and ends: at an address that is a multiple of `_PIECE`."""
    end = start + nbytes
    while start < end:
        stop = min(end, (start // _PIECE + 1) * _PIECE)
        yield start, stop
        start = stop


def _cut(
    source: "torch.Tensor", place: "torch.Tensor", host: "torch.Tensor"
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Return the copies to make: CUDA refuses one that crosses from a piece of locked host memory into the next."""
    start = host.data_ptr()
    ends = [(stop - start) // host.element_size() for _, stop in _pieces(start, host.nbytes)]
    if len(ends) < 2 or not host.is_contiguous():  # else torch copies through memory of its own
        return [(source, place)]
    flat, there = source.expand_as(place).reshape(-1), place.view(-1)
    return [(flat[a:b], there[a:b]) for a, b in pairwise([0, *ends])]


def download(source: "torch.Tensor", place: "torch.Tensor") -> Any:
    """Copy a tensor from its CUDA device to host memory, on the current stream; return an event after the copy.

    Returns at once if the memory is page-locked. The caller keeps both until the event has come.
    """
    cuda = _cuda()
    with cuda.device(source.device):
        for one, there in _cut(source, place, place):
            _copy(one, there)
        event = cuda.Event()
        event.record()
        return event


def release_done() -> None:
    """Drop the sources of the copies that are done."""
    for copy in list(_in_flight):
        if copy.event is not None and copy.event.query():
            _in_flight.discard(copy)


def finish() -> None:
    """Wait for all copies that have begun, and drop their sources."""
    for copy in list(_in_flight):
        if copy.event is not None:
            copy.event.synchronize()
            _in_flight.discard(copy)


class HostMemory:
    """Host memory that is page-locked for CUDA as long as this object lives; DeviceError if the driver refuses.

    `owner` keeps the mapping alive. With `writes`, the device may write to it, too.
    """

    def __init__(self, address: int, nbytes: int, owner: Any, *, writes: bool = False) -> None:
        self._owner = owner
        self._locked: list[int] = []
        self._pid = os.getpid()
        self.nbytes = nbytes
        require_cuda()
        self._cudart = _cuda().cudart()
        try:
            for start, stop in _pieces(address, nbytes):
                self._lock(start, stop - start, (0,) if writes else (_READ_ONLY, 0))
        except BaseException:  # also an interrupt: all of them may take minutes
            self.close()
            raise

    def _lock(self, address: int, nbytes: int, choices: tuple[int, ...]) -> None:
        codes = []
        for flags in choices:  # a device that does not know the flag may not need it
            code = int(self._cudart.cudaHostRegister(address, nbytes, flags))
            if code == 0:
                self._locked.append(address)
                return
            codes.append(f"{code} {'read-only' if flags else 'without flags'}")
        raise DeviceError(
            f"cudaHostRegister of {nbytes} of {self.nbytes} bytes failed: {', '.join(codes)}",
            hint="check `ulimit -l` and the container's memory limit, or go on without it: copies are slower then",
        )

    def close(self) -> None:
        """Wait for the copies, and unlock the pages; idempotent."""
        locked, self._locked = self._locked, []
        if locked and self._pid == os.getpid():
            finish()
            for address in locked:
                self._cudart.cudaHostUnregister(address)

    def __del__(self) -> None:
        self.close()
