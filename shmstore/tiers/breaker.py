"""When to ask a tier: not while it fails, and not for what is cheaper to make again."""

import logging
import threading
import time
from collections import OrderedDict
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


class Costs:
    """What it takes to fetch an item, by its size, and to process one; both measured, in seconds.

    Sizes are counted by powers of two. Each figure is an average in which the last eight count most.
    """

    _WEIGHT = 1 / 8
    _RETRY = 16
    _PENDING = 1024

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fetch: dict[int, float] = {}
        self._process: float | None = None
        self._begun: OrderedDict[str, float] = OrderedDict()
        self._declined = 0

    def missed(self, key: str) -> None:
        """Note that this item is about to be processed."""
        self._begun[key] = self._clock()
        while len(self._begun) > self._PENDING:
            self._begun.popitem(last=False)

    def processed(self, key: str) -> None:
        """Note that it has been."""
        if (begun := self._begun.pop(key, None)) is not None:
            self._process = self._mean(self._process, self._clock() - begun)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Note how long a fetch has taken."""
        self._fetch[nbytes.bit_length()] = self._mean(self._fetch.get(nbytes.bit_length()), seconds)

    def saved(self, seconds: float) -> float:
        """Return how much faster a fetch was than processing is; 0.0 if that is not known."""
        return 0.0 if self._process is None else max(0.0, self._process - seconds)

    def worth(self, nbytes: int) -> bool:
        """Return whether to fetch so many bytes: not if processing takes less; then one of 16 measures again."""
        fetch = self._fetch.get(nbytes.bit_length())
        if fetch is None or self._process is None or fetch < self._process:
            return True
        self._declined += 1
        return self._declined % self._RETRY == 0

    def _mean(self, before: float | None, now: float) -> float:
        return now if before is None else before + self._WEIGHT * (now - before)
