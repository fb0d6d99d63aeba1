"""What comes into a store and what leaves it, as frozen records."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from shmstore.bindings import store as native
from shmstore.errors import EventsLostError
from shmstore.namespaces import split

LOG_BYTES = 4 << 20
"""Size of the log: some 50,000 events with keys of 64 bytes."""


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """An object that has come into the store, or left it."""

    kind: Literal["put", "evicted", "deleted"]
    """"put": committed; "evicted": reclaimed to make room; "deleted": by `delete` or `clear`, or an undone call."""
    key: str
    """Its key."""
    object_id: int
    """Its id, as in `ObjectRef.monotonic_id`. An id has one put, and at most one event of another kind."""
    position: int
    """Where to go on after this event: `events(position)`."""
    namespace: str | None = None
    """The namespace of its key; None for a plain key."""


def _event(packed: native.Event, position: int) -> StoreEvent:
    kind, key, object_id = packed
    namespace, plain = split(key)
    return StoreEvent(cast(Literal["put", "evicted", "deleted"], kind), plain, object_id, position, namespace)


def stored_events(writer: native.Writer) -> Iterator[StoreEvent]:
    """Yield a put for each stored object, all with the position at which they hold."""
    events, position = writer.stored()
    for packed in events:
        yield _event(packed, position)


def events_from(read: Callable[[int], tuple[list[native.Event], int, int]], position: int) -> Iterator[StoreEvent]:
    """Yield the events from `position` on, until there are no more."""
    while True:
        try:
            events, _, first = read(position)
        except ValueError:
            raise ValueError(f"position must be that of an event of this store, not {position}") from None
        if first > position:
            raise EventsLostError(f"{first - position} events were lost", lost=first - position)
        if not events:
            return
        for packed in events:
            position += 1
            yield _event(packed, position)
