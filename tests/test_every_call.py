"""A process is killed before each of its system calls that others can see, in a run each: it harms nobody.

The parent traces it. Other tests kill at labelled moments of the C code, and at random ones.
"""

import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import Cache, ObjectStoreReader, ObjectStoreWriter, Queue
from shmstore.store.claims import Claim
from tests.support import in_child

_TRACEME, _SYSCALL, _SETOPTIONS, _INFO = 0, 24, 0x4200, 0x420E
_OPTIONS, _CALL = 1, signal.SIGTRAP | 0x80  # PTRACE_O_TRACESYSGOOD, and the stop that it marks
_CALLS = {  # read, write, close, the rest of what changes files, folders, mappings and locks
    "x86_64": {0, 1, 3, 9, 11, 18, 72, 73, 77, 82, 83, 84, 86, 87, 91, 93, 133, 257, 258, 259, 263, 264, 265, 285, 316},
    "aarch64": {25, 32, 33, 34, 35, 37, 38, 46, 47, 52, 55, 56, 57, 63, 64, 68, 215, 222, 276},
}
_FCNTL, _LOCKS = {72, 25}, {6, 7, 37, 38}
Say = Callable[[str], None]


class _Info(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("more", ctypes.c_uint8 * 23),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
        ("rest", ctypes.c_uint64 * 4),
    )

    def is_seen(self) -> bool:
        """Say whether it is the beginning of such a call."""
        return (
            self.op == 1
            and self.number in _CALLS[platform.machine()]
            and (self.number not in _FCNTL or self.arguments[1] in _LOCKS)
        )


def _ptrace(request: int, pid: int = 0, address: int = 0, data: Any = 0) -> int:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    return int(call(request, pid, address, data))


def killed_before(number: int, act: Callable[[Say], None]) -> tuple[list[str], bool]:
    """Do `act` in a child that dies before its call of that number; return what it has said, and if it was killed."""
    reading, writing = os.pipe()

    def say(text: str) -> None:
        os.write(writing, f"{text}\n".encode())

    if (pid := os.fork()) == 0:
        if _ptrace(_TRACEME):
            os._exit(2)
        status = 1
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGSTOP)
            act(say)
            status = 0
        os._exit(status)
    os.close(writing)
    killed, info, passed_on = False, _Info(), 0
    status = os.waitpid(pid, 0)[1]
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)
    while _ptrace(_SYSCALL, pid, 0, passed_on) == 0:
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSTOPPED(status):
            break
        passed_on = 0 if os.WSTOPSIG(status) == _CALL else os.WSTOPSIG(status)
        if passed_on or _ptrace(_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info)) <= 0 or not info.is_seen():
            continue
        number -= 1
        if number == 0:
            killed = True
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
    with os.fdopen(reading) as said:
        if not killed and os.WEXITSTATUS(status) == 2:
            pytest.skip("this process may not trace its children")
        assert killed or status == 0
        return said.read().splitlines(), killed


class OfStore:
    """It creates a store without a name, and one with a name; it puts, and claims a key."""

    @staticmethod
    def pass_by(folder: Path) -> None:
        ObjectStoreWriter.create(capacity=1 << 20, n_readers=1, dir=folder).close()

    @staticmethod
    def opened(folder: Path) -> ObjectStoreWriter:
        return ObjectStoreWriter.open("s", capacity=1 << 20, n_readers=1, n_writers=2, dir=folder)

    def act(self, folder: Path, say: Say) -> None:
        self.pass_by(folder)
        with self.opened(folder) as writer:
            for key in "ab":
                writer.put(key, np.full(999, ord(key)), hold=True)
                say(key)
            with writer.protect(["a"]):
                writer.find_or_claim("c")

    def check(self, folder: Path, said: list[str]) -> None:
        with ThreadPoolExecutor(1) as pool:  # a reader that waits for the next process that opens the store
            waiting = pool.submit(ObjectStoreReader.attach, "s", finds_only=True, wait=4, dir=folder)
            with self.opened(folder) as writer, waiting.result() as reader:
                for key in said:
                    found = reader.find(key)
                    assert found is not None
                    assert np.array_equal(np.full(999, ord(key)), reader.get(found.ref))
                    del found
                for number in range(30):
                    writer.put(f"{number}", np.ones(100 << 10, np.uint8), lease=False)
                assert isinstance(reader.find_or_claim("c", wait=0), Claim)
        ObjectStoreWriter.unlink("s", dir=folder)
        self.pass_by(folder)  # which removes what is left of the one without a name


class OfCache:
    """It makes a cache, and makes, replaces and removes values."""

    @staticmethod
    def opened(folder: Path) -> Cache:
        return Cache("c", "8 MiB", processes=2, dir=folder)

    def act(self, folder: Path, say: Say) -> None:
        with self.opened(folder) as cache:
            cache.get_or_make("a", lambda: np.full(9999, 1))
            say("made")
            cache["a"] = np.full(9999, 2)
            say("replaced")
            del cache["a"]
            say("removed")

    def check(self, folder: Path, said: list[str]) -> None:
        may = {"made": (1, 2, 0), "replaced": (2, 0), "removed": (0,)}[said[-1]] if said else (0, 1)
        with self.opened(folder) as cache:
            assert set(cache.get("a", [0])) <= {*may}
            for number in range(200):
                assert number == cache.get_or_make(f"{number}", partial(np.full, 9999, number))[-1]
            assert 5 == cache.get_or_make("b", lambda: 5)
            cache["a"] = 7
            assert 7 == cache.pop("a")
            assert not any(cache.stats().not_stored.values())
        Cache.unlink("c", dir=folder)


class OfQueue:
    """It makes a queue, puts and gets, with and without an acknowledgement."""

    @staticmethod
    def opened(folder: Path) -> Queue:
        return Queue("1 MiB", name="q", dir=folder)

    def act(self, folder: Path, say: Say) -> None:
        with self.opened(folder) as queue:
            for number in range(4):
                queue.put(np.full(999, number))
                say(f"put {number}")
            with queue.get(ack=True) as value:
                say(f"got {value[-1]}")
            say(f"got {queue.get()[-1]}")

    def check(self, folder: Path, said: list[str]) -> None:
        put, got = ([int(text[4:]) for text in said if text.startswith(what)] for what in ("put", "got"))
        with self.opened(folder) as queue:
            found = self.drained(queue)
            assert sorted(found) == found == list(range(found[0] if found else 0, len(put) + (len(found) > len(put))))
            assert {*put} - {*got} - {len(got)} <= {*found}, "more is lost than what it had in its hands"
            assert not {*got[1:]} & {*found}, "what was got without an acknowledgement comes again"
            for _ in range(2):
                numbers = list(range(20))
                for number in numbers:
                    queue.put(np.full(999, number), timeout=4)
                assert numbers == self.drained(queue)
        Queue.unlink("q", dir=folder)

    @staticmethod
    def drained(queue: Queue) -> list[int]:
        found = []
        while not queue.empty():
            found.append(int(queue.get(timeout=4)[-1]))
        return found


@pytest.mark.skipif(platform.machine() not in _CALLS, reason="the numbers of its system calls are not listed here")
@pytest.mark.parametrize("life", [OfStore(), OfCache(), OfQueue()], ids=["store", "cache", "queue"])
def test_a_process_that_is_killed_before_any_of_its_calls_harms_nobody(life: Any, folder: Path) -> None:
    for number in count(1):
        said, killed = killed_before(number, partial(life.act, folder))
        for path in folder.iterdir():
            if path.stat().st_size == 0:
                os.utime(path, (0, 0))  # while it is young, the next process waits some seconds for its creator
        begin = time.monotonic()
        in_child(life.check, folder, said)
        assert time.monotonic() - begin < 8, f"somebody has waited for the one that died before call {number}"
        assert [] == [*folder.iterdir()], f"the one that died before call {number} has left something"
        if not killed:
            break
    assert number > 30
