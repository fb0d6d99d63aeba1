"""Write-behind: a bounded queue of calls, and the thread that makes them."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from shmstore.errors import ShmStoreError

__all__ = ["WriteBehind"]

_log = logging.getLogger(__name__)


class WriteBehind:
    """Makes calls in a thread of its own; a full queue drops its oldest call and counts it.

    `add` never waits. The thread starts with the first call. An error of a call is logged, and the thread goes on.
    """

    def __init__(self, limit: int) -> None:
        self._calls: deque[Callable[[], object]] = deque(maxlen=limit)
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Calls that were never made."""

    def __len__(self) -> int:
        return len(self._calls)  # the calls that wait

    def add(self, call: Callable[[], object]) -> None:
        """Append a call."""
        with self._changed:
            if self._closed:
                return
            self.dropped += len(self._calls) == self._calls.maxlen
            self._calls.append(call)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shmstore-tier", daemon=True)
                thread.start()
                self._thread = thread  # after its start, which may fail
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all calls have been made; return False if `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not (self._calls or self._busy), timeout)

    def close(self, timeout: float) -> None:
        """Make the calls that are queued, for `timeout` seconds at most, and drop the rest; idempotent."""
        self.flush(timeout)
        with self._changed:
            self.dropped += len(self._calls)
            self._calls.clear()
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._calls)
                if not self._calls:
                    return
                call = self._calls.popleft()
                self._busy = True
            try:
                call()
            except ShmStoreError as error:  # for example, the store was closed meanwhile
                _log.debug("an object is not offered: %s", error)
            except Exception:
                _log.exception("an object could not be offered")
            del call
