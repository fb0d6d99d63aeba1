"""When to ask a tier: not while it fails."""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Breaker:
    """Opens after failures in a row; then nobody asks the tier but a thread that tries it from time to time.

    So a tier that is down costs requests a few quick errors, or one that is late. `probe` returns if the tier answers,
    and raises if it does not. `answered` is called once the breaker has closed again.
    """

    failures = 3
    """How many open it, unless one takes `late` seconds."""
    late = 0.1
    first, longest = 1.0, 30.0
    """Seconds between calls of the probe; each pause is twice the one before."""

    def __init__(self, probe: Callable[[], object], answered: Callable[[], object]) -> None:
        self._probe, self._answered = probe, answered
        self._lock = threading.Lock()
        self._failures = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> bool:
        """Whether to leave the tier alone."""
        return self._thread is not None

    def succeeded(self) -> None:
        """Note an answer, also one that is a miss."""
        self._failures = 0

    def failed(self, seconds: float) -> bool:
        """Note an error that came after so many seconds; return whether it has opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._thread or self._end.is_set() or (seconds < self.late and self._failures < self.failures):
                return False
            thread = threading.Thread(target=self._try_again, name="shmstore-tier-probe", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is free, and nobody could close it again; the next error tries again
                return False
            self._thread = thread  # the thread takes the lock before it ends
            return True

    def close(self) -> None:
        """End the thread, as soon as its call has returned; idempotent."""
        self._end.set()

    def _try_again(self) -> None:
        pause = self.first
        while not self._end.wait(pause):
            try:
                self._probe()
            except Exception:
                pause = min(2 * pause, self.longest)
                continue
            with self._lock:
                self._failures, self._thread = 0, None
            _log.warning("the tier answers again")
            self._answered()
            return
