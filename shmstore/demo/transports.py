"""The ways an item can reach the workers. The processes know a way only by these three classes.

A `Sender` lives in the API process and turns an item into a parcel of bytes; a `Receiver` lives in each worker and
turns the bytes back into tensors; a `Transport` makes both. `TRANSPORTS` lists what the demo can compare.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Protocol, cast

from shmstore import (
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    ObjectTooLargeError,
    StoreFullError,
    StoreHandle,
)
from shmstore.demo.processing import Item


@dataclass(frozen=True)
class Parcel:
    """An item made ready for the pipe."""

    payload: bytes
    inline: bool
    """Whether the payload holds the tensors themselves rather than a reference."""


@dataclass(frozen=True)
class SenderCounts:
    """What a sender did so far."""

    hits: int = 0
    evictions: int = 0
    inline_fallbacks: int = 0
    """Items that found no room in the store and travelled through the pipes instead."""
    copied: int = 0
    """Bytes of tensors copied by the sender: into the store or into a pickle."""


@dataclass(frozen=True)
class TransportSettings:
    """What a transport may need to know; each takes what concerns it."""

    workers: int
    store_name: str
    capacity: int
    """Bytes of the store's data region."""


class Sender(Protocol):
    """The API process's side."""

    @property
    def opening(self) -> Any:
        """What a worker needs to make its `Receiver`: small, and it pickles."""
        ...

    def pack(self, key: str, item: Item) -> Parcel:
        """Return the item as bytes for every worker."""
        ...

    def counts(self) -> SenderCounts:
        """Return what was done so far."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Receiver(Protocol):
    """A worker's side."""

    @property
    def copied(self) -> int:
        """Bytes of tensors copied so far."""
        ...

    def unpack(self, payload: bytes, inline: bool) -> Item:
        """Return the tensors of one parcel."""
        ...

    def close(self) -> None:
        """Give everything back; the tensors must be gone."""
        ...


class Transport(Protocol):
    """One way of sending: a name and both its sides."""

    name: str
    keeps_segment: bool
    """Whether it makes a segment under `TransportSettings.store_name` that must not outlive the run."""

    def sender(self, settings: TransportSettings) -> Sender:
        """Return the API process's side."""
        ...

    def receiver(self, opening: Any, rank: int) -> Receiver:
        """Return the side of worker `rank`, from its sender's `opening`."""
        ...


class PickleSender:
    """Pickles the whole item, each time that it is asked for."""

    opening = None

    def __init__(self) -> None:
        self._copied = 0

    def pack(self, key: str, item: Item) -> Parcel:
        """Return the pickled item."""
        payload = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        self._copied += len(payload)
        return Parcel(payload, inline=True)

    def counts(self) -> SenderCounts:
        """Return what was copied; nothing else can happen here."""
        return SenderCounts(copied=self._copied)

    def close(self) -> None:
        """Nothing is held."""


class PickleReceiver:
    """Unpickles the whole item."""

    def __init__(self) -> None:
        self.copied = 0

    def unpack(self, payload: bytes, inline: bool) -> Item:
        """Return private tensors."""
        self.copied += len(payload)
        return cast(Item, pickle.loads(payload))

    def close(self) -> None:
        """Nothing is held."""


class PickleTransport:
    """Tensors pickled through the pipes: what an engine does that has no store."""

    name = "pickle"
    keeps_segment = False

    def sender(self, settings: TransportSettings) -> Sender:
        """Return the API process's side."""
        return PickleSender()

    def receiver(self, opening: Any, rank: int) -> Receiver:
        """Return the side of worker `rank`."""
        return PickleReceiver()


class StoreSender:
    """Puts an item once; sends a reference each time. An item that finds no room travels pickled."""

    def __init__(self, settings: TransportSettings) -> None:
        # Prefaulted, so that the clock sees a store in use and not the kernel clearing its pages for the first time.
        self._writer = ObjectStoreWriter.create(
            settings.store_name, capacity=settings.capacity, n_readers=settings.workers, prefault=True
        )
        self._inline = PickleSender()
        self._inline_fallbacks = 0

    @property
    def opening(self) -> StoreHandle:
        """The store's handle."""
        return self._writer.handle

    def pack(self, key: str, item: Item) -> Parcel:
        """Return a reference to the stored item, or the pickled item where there is no room for it."""
        try:
            try:
                ref = self._writer.get_cached(key)
            except ObjectNotFoundError:
                ref = self._writer.put(key, item)
        except (StoreFullError, ObjectTooLargeError):
            self._inline_fallbacks += 1
            return self._inline.pack(key, item)
        return Parcel(ref.to_bytes(), inline=False)

    def counts(self) -> SenderCounts:
        """Return what was done so far."""
        stats = self._writer.stats()
        return SenderCounts(
            hits=stats.hits,
            evictions=stats.evictions,
            inline_fallbacks=self._inline_fallbacks,
            copied=stats.put_bytes + self._inline.counts().copied,
        )

    def close(self) -> None:
        """Close and unlink the store."""
        self._writer.close()


class StoreReceiver:
    """Takes the tensors in place."""

    def __init__(self, handle: StoreHandle, rank: int) -> None:
        self._reader = ObjectStoreReader.attach(handle, rank)
        self._inline = PickleReceiver()

    @property
    def copied(self) -> int:
        """Bytes of the items that came inline; the others are not copied."""
        return self._inline.copied

    def unpack(self, payload: bytes, inline: bool) -> Item:
        """Return read-only views into the store, or private tensors for an item that came inline."""
        if inline:
            return self._inline.unpack(payload, inline)
        return cast(Item, self._reader.get(ObjectRef.from_bytes(payload)))

    def close(self) -> None:
        """Detach."""
        self._reader.close()


class StoreTransport:
    """Each item once into shared memory, and a reference of a few dozen bytes through the pipes."""

    name = "store"
    keeps_segment = True

    def sender(self, settings: TransportSettings) -> Sender:
        """Return the API process's side, which owns the store."""
        return StoreSender(settings)

    def receiver(self, opening: Any, rank: int) -> Receiver:
        """Return the side of worker `rank`."""
        return StoreReceiver(opening, rank)


TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in (StoreTransport(), PickleTransport())}
"""Every mode, in the order in which they run and are shown."""
