"""Write-behind: a bounded queue of calls, and the thread that makes them.

An interrupt of a caller leaves no lock taken, because each is taken by `with` alone.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Container
from queue import Empty, SimpleQueue

from shmstore.errors import ShmStoreError

_log = logging.getLogger(__name__)
_Answer = SimpleQueue[None]
_END: _Answer = SimpleQueue()


class WriteBehind:
    """Makes calls in a thread of its own; a full queue drops its oldest call and counts it.

    `add` and `wake` never wait. The thread calls `between` before and after each. It starts with the first call
    or `wake`; if no thread can be started, calls are dropped. An error of a call is logged, and the thread goes on.
    """

    def __init__(self, limit: int, between: Callable[[], object] = lambda: None) -> None:
        self._calls: deque[tuple[object, Callable[[], object]]] = deque(maxlen=limit)
        self._between = between
        self._wakes: SimpleQueue[_Answer | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Calls that were never made."""

    def __len__(self) -> int:
        return len(self._calls)  # the calls that wait

    def add(self, what: object, call: Callable[[], object]) -> None:
        """Append a call about `what`."""
        with self._lock:
            if not self._woken():
                self.dropped += 1
                return
            self.dropped += len(self._calls) == self._calls.maxlen
            self._calls.append((what, call))

    def drop(self, whats: Container[object]) -> None:
        """Drop the calls about these that wait, and count them."""
        with self._lock:
            kept = [each for each in self._calls if each[0] not in whats]
            self.dropped += len(self._calls) - len(kept)
            self._calls = deque(kept, self._calls.maxlen)

    def wake(self) -> None:
        """Let the thread call `between`, and make what waits."""
        with self._lock:
            self._woken()

    def _woken(self) -> bool:
        if self._closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="shmstore-tier", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is free; the next call tries again
                return False
            self._thread = thread
        if self._wakes.empty():
            self._wakes.put(None)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until all calls have been made; return False if `timeout` seconds were not enough."""
        answer: _Answer = SimpleQueue()
        with self._lock:
            if self._closed or self._thread is None:
                return True
            self._wakes.put(answer)
        try:
            answer.get(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX))
        except Empty:
            return False
        return True

    def close(self, timeout: float) -> None:
        """Make the calls that are queued, for `timeout` seconds at most, and drop the rest; idempotent."""
        self.flush(timeout)
        with self._lock:
            self._closed = True
            self.dropped += len(self._calls)
            self._calls.clear()
            self._wakes.put(_END)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        with self._turn:  # an interrupt of `start` may let a second thread come
            while (answer := self._wakes.get()) is not _END:
                self._make(self._between)
                while (call := self._next()) is not None:
                    self._make(call)
                    self._make(self._between)
                if answer is not None:
                    answer.put(None)
            self._wakes.put(_END)  # for the second thread

    def _next(self) -> Callable[[], object] | None:
        with self._lock:  # `add` wakes the thread, then appends: wait for that
            return self._calls.popleft()[1] if self._calls else None

    def _make(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ShmStoreError as error:  # for example, the store was closed meanwhile
            _log.debug("an object is not published: %s", error)
        except Exception:
            _log.exception("an object could not be published")
