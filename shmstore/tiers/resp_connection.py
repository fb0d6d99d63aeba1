"""Speaks RESP, the protocol of Redis, over a socket that redis-py has connected; for `RespTier`."""

import struct
import time
from collections.abc import Sequence
from select import POLLIN, poll
from typing import Any

from shmstore.errors import TierError, TierFullError, cut, shown
from shmstore.tiers.arguments import MAX_SPANS

__all__ = ["NUMBER", "SIZE", "RespConnection", "Word"]

_READ = 4096
"""The bytes that are received at once where lines are expected; payload among them is copied once."""
_GATHER = 1 << 14
"""Pieces of a command up to this size are copied into one buffer, which saves a system call for each."""
NUMBER, SIZE = struct.Struct("<H"), struct.Struct("<Q")
"""Of the table at the start of a first span: the number of the spans, and the size of one."""
_HINTS = {
    "NOAUTH": "give the password in the URL: redis://:PASSWORD@HOST:PORT or redis://USER:PASSWORD@HOST:PORT",
    "WRONGPASS": "correct the user and the password in the URL: redis://USER:PASSWORD@HOST:PORT",
    "NOPERM": "let this user (ACL) run AUTH, SELECT, SET, GET, GETRANGE, STRLEN, EXISTS and UNLINK",
    "MOVED": "name one server or a proxy: a tier does not follow a cluster from node to node",
    "READONLY": "name the primary: this server is a replica",
}

Word = bytes | list[memoryview]
"""A word of a command; the pieces of a list are sent from where they lie."""


class RespConnection:
    """Speaks RESP over a socket that redis-py has connected; each wait ends at `deadline`."""

    def __init__(self, redis: Any, name: str, deadline: float) -> None:
        self._redis = redis
        self._socket = redis._sock  # redis-py has no public name for it
        self._name = name
        self._read = bytearray()  # received, not used yet
        self._scratch = memoryview(bytearray(_READ))
        self.deadline = deadline
        self.unanswered = 0

    def send(self, commands: Sequence[tuple[Word, ...]]) -> None:
        """Send commands in one go; each needs its answer read."""
        self.unanswered += len(commands)
        gathered = bytearray()
        for words in commands:
            gathered += b"*%d\r\n" % len(words)
            for word in words:
                pieces = [word] if isinstance(word, bytes) else word
                gathered += b"$%d\r\n" % sum(map(len, pieces))
                for piece in pieces:
                    if len(piece) > _GATHER:
                        self._send(memoryview(gathered))
                        self._send(memoryview(piece))
                        gathered = bytearray()
                    else:
                        gathered += piece
                gathered += b"\r\n"
        self._send(memoryview(gathered))

    def ok(self) -> None:
        """Read the answer of a command that has nothing to tell."""
        self._line(b"+")
        self.unanswered -= 1

    def number(self) -> int:
        """Read an answer that is a number."""
        number = self._digits(b":", self._line(b":"))
        self.unanswered -= 1
        return number

    def size(self) -> int | None:
        """Read the size of an answer that is bytes, to `take` or to `fill` in and to `end`; None if there are none."""
        line = self._line(b"$")
        if line == b"-1":
            self.unanswered -= 1
            return None
        return self._digits(b"$", line)

    def table(self, length: int) -> list[int]:
        """Return the sizes at the start of a first span of `length` bytes; empty if they do not fit its length."""
        number = NUMBER.unpack(self.take(NUMBER.size))[0] if length >= NUMBER.size else 0
        rest = length - NUMBER.size - number * SIZE.size
        if not 0 < number <= MAX_SPANS or rest < 0:
            return []
        sizes = [size for (size,) in SIZE.iter_unpack(self.take(number * SIZE.size))]
        return sizes if sizes[0] == rest else []

    def start(self) -> int:
        """Return the number of spans from an answer with only the start of a table; 0 if there is none."""
        size = self.size()
        if size is None:
            return 0
        if size > NUMBER.size:
            raise self._nonsense(b"$%d" % size)
        said = self.take(size)
        self.end()
        number: int = NUMBER.unpack(said)[0] if size == NUMBER.size else 0
        return number if number <= MAX_SPANS else 0

    def take(self, size: int) -> bytearray:
        """Return the next few bytes of an answer."""
        taken = bytearray(size)
        self.fill(memoryview(taken))
        return taken

    def fill(self, memory: memoryview) -> None:
        """Read bytes of an answer until `memory` is full."""
        done = min(len(self._read), len(memory))
        memory[:done] = self._read[:done]
        del self._read[:done]
        while done < len(memory):
            done += self._receive(memory[done:])

    def end(self) -> None:
        """Read the end of an answer's bytes."""
        end = self.take(2)
        if end != b"\r\n":
            raise self._nonsense(bytes(end))
        self.unanswered -= 1

    def is_quiet(self) -> bool:
        """Return whether the server has neither ended this connection nor said anything unasked."""
        waiting = poll()
        waiting.register(self._socket, POLLIN)
        return not self._read and not waiting.poll(0)

    def close(self) -> None:
        """End the connection; idempotent."""
        self._redis.disconnect()

    def _line(self, kind: bytes) -> bytes:
        while (end := self._read.find(b"\r\n")) < 0:
            if len(self._read) >= _READ:
                raise self._nonsense(bytes(self._read))
            received = self._receive(self._scratch)
            self._read += self._scratch[:received]
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        if line.startswith(b"-WRONGTYPE"):  # what somebody else keeps there is no span
            return b"-1" if kind == b"$" else b"0"
        if line[:1] == b"-":
            self.unanswered -= 1
            raise self._refusal(line[1:].decode(errors="replace"))
        if line[:1] != kind:
            raise self._nonsense(line)
        return line[1:]

    def _digits(self, kind: bytes, line: bytes) -> int:
        if not line.isdigit() or len(line) > 18:
            raise self._nonsense(kind + line)
        return int(line)

    def _send(self, data: memoryview) -> None:
        try:
            while data:
                self._socket.settimeout(self._left())
                data = data[self._socket.send(data) :]
        except OSError as error:
            raise self._failure(error) from None

    def _receive(self, memory: memoryview) -> int:
        try:
            self._socket.settimeout(self._left())
            received: int = self._socket.recv_into(memory)
        except OSError as error:
            raise self._failure(error) from None
        if received == 0:
            raise TierError(f"{self._name} ended the connection")
        return received

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _failure(self, error: OSError) -> TierError:
        if isinstance(error, TimeoutError):
            return TierError(f"{self._name} did not answer in time")
        return TierError(f"the connection to {self._name} failed: {cut(error)}")

    def _refusal(self, words: str) -> TierError:
        code = words.partition(" ")[0]
        refused = TierFullError if code == "OOM" else TierError
        return refused(f"{self._name} refused: {cut(words)}", hint=_HINTS.get(code))

    def _nonsense(self, said: bytes) -> TierError:
        return TierError(f"{self._name} does not speak RESP as it must; it said {shown(said[:80])}")
