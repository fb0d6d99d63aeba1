"""What several tests of the store need: traceable names, comparable values, children that are waited for."""

import ctypes
import itertools
import multiprocessing
import os
import pickle
import re
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest

try:
    import torch

    ARRAYS: tuple[Any, ...] = (torch.Tensor, np.ndarray)
except ImportError:  # conftest.py skips what imports it
    ARRAYS = (np.ndarray,)

from shmstore import MsgpackSerde, ObjectStoreReader, ObjectStoreWriter, StoreFullError
from shmstore.bindings.store import ALIGN, Options, no_space

SHM = Path("/dev/shm")
PREFIX = f"t{os.getpid()}-{secrets.token_hex(3)}"
"""Starts the name of every store that a test creates."""

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
_numbers = itertools.count()


def store_name() -> str:
    """Return a name that no store has had, which `segments` recognises."""
    return f"{PREFIX}-{next(_numbers)}"


def segments() -> set[str]:
    """Return the files in /dev/shm that this test run has made, not those of other programs."""
    ours = (PREFIX, f"shmstore-{os.getpid()}-")
    return {path.name for path in SHM.iterdir() if path.name.startswith(ours)}


def is_mapped(name: str) -> bool:
    """Say whether this process maps a file of that name in /dev/shm."""
    return f"/dev/shm/{name}" in Path("/proc/self/maps").read_text()


FRESH = multiprocessing.get_context("forkserver")
"""Starts processes that have nothing of this one, as spawned ones, but torch is loaded already: once for all."""
FRESH.set_forkserver_preload(["torch", "shmstore.multimodal"])


def children() -> set[int]:
    """Return the processes that this one has started, zombies among them, but for those of multiprocessing itself."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    found: set[int] = set()
    for parent in (os.getpid(), server):
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):  # a thread that has ended meanwhile
                found.update(map(int, path.read_text().split()))
    return found - {tracker, server}


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """Make a memory control group below that of this process, of version 1 or 2; None where none can be made."""
    paths = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines())
    above = Path("/sys/fs/cgroup", "memory" if "memory" in paths else "", paths.get("memory", paths[""]).lstrip("/"))
    group = above / store_name()
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group if any(group.glob("memory.*")) else None
    finally:
        group.rmdir()


class Stores:
    """Creates writers and attaches readers that are closed when the test ends."""

    def __init__(self) -> None:
        self._opened: list[Any] = []

    def create(self, capacity: int = 1 << 20, n_readers: int = 1, **options: Any) -> ObjectStoreWriter:
        name = options.pop("name", None) or store_name()
        return self.keep(ObjectStoreWriter.create(name, capacity=capacity, n_readers=n_readers, **options))

    def attach(self, store: Any, rank: int = 0, **options: Any) -> ObjectStoreReader:
        handle = store.handle if isinstance(store, ObjectStoreWriter) else store
        return self.keep(ObjectStoreReader.attach(handle, rank, **options))

    def recover(self, store: Any) -> ObjectStoreWriter:
        return self.keep(ObjectStoreWriter.recover(store))

    def keep(self, opened: T) -> T:
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for opened in reversed(self._opened):
            opened.close(True) if isinstance(opened, ObjectStoreWriter) else opened.close()  # what `open` had stays
        self._opened.clear()


# ---- values


def random_tensor(seed: int, nbytes: int) -> "torch.Tensor":
    """Return a tensor of `nbytes` bytes that only this seed gives; an array where there is no torch."""
    array: Any = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return array if ARRAYS == (np.ndarray,) else torch.from_numpy(array)


def bits(leaf: "torch.Tensor | np.ndarray[Any, Any]") -> bytes:
    """Return the bytes of a tensor or an array in C order, whatever its strides."""
    if not isinstance(leaf, np.ndarray):
        leaf = leaf.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    return leaf.tobytes()


def frozen(value: Any) -> Any:
    """Return what makes two values the same: kinds of containers, order, dtypes, shapes and bits."""
    if isinstance(value, ARRAYS):
        return type(value).__name__, str(value.dtype), tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return "dict", tuple((frozen(key), frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(frozen(item) for item in value)
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, value


def length_of(key: str, value: Any) -> int:
    """Return the bytes of an object as the layout counts them: key and metadata, padded, then the payload."""
    encoded = MsgpackSerde().encode(value)
    head = len(key.encode()) + len(encoded.meta)
    return -(-head // ALIGN) * ALIGN + encoded.nbytes if encoded.nbytes else head


def span_of(key: str, value: Any) -> int:
    """Return the bytes of the ring that an object takes."""
    return max(1, -(-length_of(key, value) // ALIGN)) * ALIGN


def bytes_needed(capacity: int, n_readers: int) -> int:
    """What a store of these sizes takes in /dev/shm."""
    return no_space(Options(capacity, 0, n_readers, 0), "/dev/shm").needed or 0


def state(writer: ObjectStoreWriter) -> Any:
    """Return what a refusal must leave as it is."""
    return writer.keys(), writer.stats()


def crowd(writer: ObjectStoreWriter, laps: int = 3) -> None:
    """Turn the ring over with objects that nobody waits for."""
    size = writer.stats().capacity
    for i in range(laps * (size // 1024)):
        writer.cancel(writer.put(f"crowd-{writer.stats().next_id}-{i}", random_tensor(i, 900)))


def is_held(writer: ObjectStoreWriter) -> bool:
    """Say whether anybody holds anything, by an object that needs all of the arena; what nobody holds goes for it."""
    room = min(writer.stats().capacity, writer.stats().max_object_size)
    sizes = range(room - ALIGN, 0, -ALIGN)
    value = next(value for n in sizes if length_of("all of it", value := random_tensor(0, n)) <= room)
    try:
        writer.cancel(writer.put("all of it", value))
    except StoreFullError:
        return True
    writer.delete("all of it")
    writer.check_valid()
    return False


# ---- errors


@contextmanager
def raises(
    error: type[E] | tuple[type[E], ...], names: Iterable[str] = (), hint: Iterable[str] = ()
) -> Iterator["pytest.ExceptionInfo[E]"]:
    """Expect an error whose message has each of `names`, whole, and whose hint has each of `hint`."""
    with pytest.raises(error) as caught:
        yield caught
    message, _, advice = str(caught.value).partition(" (hint: ")
    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message)]
    missing += [part for part in hint if part not in advice]
    assert not missing, f"the error does not name {missing}: {caught.value}"


# ---- file systems


def mount_alone(kind: str, folder: str | Path, options: str) -> None:
    """Mount a file system that this process alone sees; OSError where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(rc: int) -> None:
        if rc:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    user, group = os.getuid(), os.getgid()
    if user == 0:
        must(libc.unshare(0x20000))  # CLONE_NEWNS
    else:
        must(libc.unshare(0x20000 | 0x10000000))  # and CLONE_NEWUSER
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    must(libc.mount(None, b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE
    must(libc.mount(kind.encode(), os.fsencode(folder), kind.encode(), 0, options.encode()))


def on(kind: str, folder: str | Path, options: str, act: Callable[[], T]) -> T:
    """Run `act` in a child with that file system on the folder; skip where it may not be mounted."""

    def mounted() -> tuple[bool, Any]:
        try:
            mount_alone(kind, folder, options)
        except OSError as error:
            return False, f"{kind} cannot be mounted here: {error}"
        return True, act()

    there, said = in_child(mounted)
    if not there:
        pytest.skip(said)
    return said  # type: ignore[no-any-return]


# ---- threads


def run_all(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---- waiting


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds; fail after so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# ---- children


class Child:
    """A forked process that runs one function and says how it ended; close it by `join` or `kill`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run(function, arguments, writing)
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb")
        self._status: int | None = None

    def _wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._pipe.close()
        return self._status

    def join(self) -> Any:
        """Return what the function returned; AssertionError, with the trace, where it raised or was killed."""
        said = self._pipe.read()
        status = self._wait()
        if status < 0:
            raise AssertionError(f"the child died of {signal.Signals(-status).name}")
        ok, result = pickle.loads(said)
        if not ok:
            raise AssertionError(f"in the child: {result}")
        return result

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has gone; also a stopped one, also twice."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: int) -> NoReturn:
    status = 1
    try:
        try:
            said = pickle.dumps((True, function(*arguments)))
        except BaseException:
            said = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(pipe, "wb") as out:
            out.write(said)
        status = 0
    finally:
        os._exit(status)  # no atexit, no pytest: those are the parent's


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a forked process and return what it returned."""
    return Child(function, *arguments).join()


class Signal:
    """One byte through a pipe: a child or the parent says that it has come so far."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def send(self) -> None:
        os.write(self._writing, b"!")

    def wait(self) -> None:
        assert os.read(self._reading, 1) == b"!"

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextmanager
def alive(function: Callable[..., Any], *arguments: Any) -> Iterator[Child]:
    """Run a function in a child, from when it has sent the Signal that is its last argument; killed in the end."""
    ready = Signal()
    child = Child(function, *arguments, ready)
    try:
        ready.wait()
        yield child
    finally:
        child.kill()
        ready.close()
