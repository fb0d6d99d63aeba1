"""`StoreTier`: offers to a tier what its writer stores, and brings what its store misses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from shmstore.bindings.hidden import hidden
from shmstore.errors import ShmStoreError, StoreClosedError, TierError, TierFullError
from shmstore.files import DIRECTORY
from shmstore.store import ObjectStoreWriter
from shmstore.store.arguments import int_of
from shmstore.store.stats import TierStats
from shmstore.tiers.behind import WriteBehind
from shmstore.tiers.breaker import Breaker, Costs
from shmstore.tiers.objects import Incoming, serializer_of, spans_of, tier_key
from shmstore.tiers.protocol import Tier

__all__ = ["StoreTier", "TierStats"]

_log = logging.getLogger(__name__)
_MAX_QUEUE = 1 << 20
_CLOSING = 5.0
_PROBE = "shmstore:probe"


class StoreTier:
    """The tier of a store, for the process that writes to it; no call raises what the tier does wrong.

    `bring` asks the tier, in the caller's thread. All other calls return at once. Owns `tier` and closes it, and not
    the writer. Thread-safe. Stores find each other's objects if their `namespace` is the same, such as the version of a
    model. At most `queue` offers wait. Raises TypeError for a writer whose serializer has no `format_name`.
    """

    def __init__(
        self,
        writer: ObjectStoreWriter,
        tier: Tier,
        *,
        namespace: str = "",
        queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(tier, Tier):
            raise TypeError(f"tier must be a Tier, such as open_tier(url) returns, not {type(tier).__name__}")
        self._writer = writer
        self._tier = tier
        self._clock = clock
        self._namespace = namespace
        self._serializer = serializer_of(writer._serde)
        if (register := getattr(tier, "register", None)) is not None:
            data, offset = writer._writer.data()
            register(memoryview(hidden(data)), f"{DIRECTORY}/{writer.name}", offset)
        self._breaker = Breaker(lambda: tier.has([_PROBE]), self._count)
        self._costs = Costs(clock)
        self._behind = WriteBehind(int_of("queue", queue, 1, _MAX_QUEUE))
        self._lock = threading.Lock()
        self._flights: dict[tuple[str, str | None], threading.Event] = {}
        self._counts: dict[str, Any] = {}
        self._count()

    def bring(self, key: str, *, scope: str | None = None) -> bool:
        """Fetch a missing object into the store; return whether it is there now.

        Callers that ask for one key at a time fetch it once. If the answer is False, the caller will process the item:
        the time until `offer` for it is what processing takes, and `bring` fetches only what takes less.
        """
        flight, mine = (key, scope), threading.Event()
        try:
            other = self._flights.setdefault(flight, mine)
            if other is not mine:
                self._await(flight, other)
                return self._writer.is_cached(key, scope=scope)
            found = self._writer.is_cached(key, scope=scope)  # by the flight before
            if not found:
                self._ask(self._fetch, key, scope, self._name(key, scope))
                found = self._writer.is_cached(key, scope=scope)
        finally:
            if self._flights.get(flight) is mine:
                del self._flights[flight]
                mine.set()
        if not found:
            self._costs.missed(key)
        return found

    def settle(self, key: str, *, scope: str | None = None) -> None:
        """Wait until nobody brings this key; for a caller that is about to put it."""
        if self._flights and (other := self._flights.get((key, scope))) is not None:
            self._await((key, scope), other)

    def _await(self, flight: tuple[str, str | None], other: threading.Event) -> None:
        while self._flights.get(flight) is other and not other.wait(0.1):
            pass  # an interrupt may have ended that flight before it could say so

    def offer(self, key: str, *, scope: str | None = None) -> None:
        """Send an object that was just put, some time soon; the oldest of too many are dropped."""
        self._costs.processed(key)
        self._behind.add(partial(self._offer, key, scope))

    def forget(self, keys: Iterable[str], *, scope: str | None = None) -> None:
        """Remove these objects from the tier, some time soon, so that no other host fetches them."""
        if names := [self._name(key, scope) for key in keys]:
            self._behind.add(partial(self._ask, self._remove, names))

    def flush(self, timeout: float) -> bool:
        """Wait until all offers are sent; return False if `timeout` seconds were not enough."""
        return self._behind.flush(timeout)

    def stats(self) -> TierStats:
        """Return the figures so far."""
        with self._lock:
            return self._stats()

    def _stats(self) -> TierStats:
        counts = {"dropped": 0} | self._counts
        counts["dropped"] += self._behind.dropped
        return TierStats(**counts, queued=len(self._behind), open=self._breaker.open)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most, and close the tier; idempotent.

        Close the writer after it.
        """
        self._behind.close(_CLOSING)
        self._breaker.close()
        try:
            self._tier.close()
        except TierError as error:
            _log.warning("the tier could not be closed: %s", error)
        self._count()

    def _count(self, **more: float) -> None:
        """Add to the counts, and show all figures in the segment; so each call to the tier ends with it."""
        with self._lock:
            for name, value in more.items():
                self._counts[name] = self._counts.get(name, 0) + value
            with suppress(StoreClosedError):  # nobody looks there any more
                self._writer._writer.show_tier(self._stats())  # within the lock, so that no older figures come later

    def _ask(self, call: Callable[..., bool], *arguments: Any) -> bool:
        """Return what the call does; False if it fails or is not made. This is where the tier's errors end."""
        if self._breaker.open:
            self._count(skipped=1)
            return False
        begin = self._clock()
        try:
            answer = call(*arguments)
        except TierFullError:
            self._count(refused=1)
            answer = False
        except Exception as error:
            if isinstance(error, ShmStoreError) and not isinstance(error, TierError):
                raise  # the store's, which was closed
            opened = self._breaker.failed(self._clock() - begin)
            self._count(errors=1)
            if not isinstance(error, TierError):  # a back end's mistake is not the request's
                _log.exception("the tier's back end failed")
            if opened:
                _log.warning("the tier is left alone for a while: %s", error)
            return False
        self._breaker.succeeded()
        return answer

    def _fetch(self, key: str, scope: str | None, name: str) -> bool:
        begin = self._clock()
        incoming = Incoming(self._writer, key, scope, name, self._costs.worth)
        if not self._tier.fetch(name, incoming.into):
            self._count(**{"declined" if incoming.declined else "damaged" if incoming.begun else "misses": 1})
            return False
        if not incoming.commit():
            self._count(damaged=1)
            return False
        seconds = self._clock() - begin
        self._costs.fetched(incoming.nbytes, seconds)
        self._count(hits=1, hit_bytes=incoming.nbytes, saved_seconds=self._costs.saved(seconds))
        return True

    def _offer(self, key: str, scope: str | None) -> None:
        if not self._ask(self._send, key, scope, self._name(key, scope)):
            self._count(dropped=1)

    def _send(self, key: str, scope: str | None, name: str) -> bool:
        spans = spans_of(self._writer, key, scope, name)  # pinned until they are sent
        if spans is None:
            return False
        tags = {"serializer": self._serializer} | ({} if scope is None else {"scope": scope})
        self._tier.offer(name, spans, tags)
        self._count(offered=1, offered_bytes=len(spans[1]))
        return True

    def _remove(self, names: list[str]) -> bool:
        self._tier.forget(names)
        self._count()
        return True

    def _name(self, key: str, scope: str | None) -> str:
        return tier_key(key, scope, self._serializer, self._namespace)
