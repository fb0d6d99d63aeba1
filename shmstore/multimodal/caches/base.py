"""The two interfaces of the multi-modal caches, for engines and for other implementations.

P0, the API server, has a `BaseMultiModalProcessorCache`. P1, the engine core, and the workers have a
`BaseMultiModalReceiverCache`. For each request the order is

    P0: is_cached or begin → preprocess the rest → get_and_update → send the outputs as `MultiModalFeatureSpec.data`
    P1 or worker: get_and_update_features → the model

`release` (a request ends early), `invalidate` (P1 rejects it) and `close` exist in every mode, and may do nothing. An
engine therefore need not ask which cache it has.

An implementation needs the methods for one item, and the batch methods here use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, Self, TypeVar

from shmstore.errors import unnamed
from shmstore.multimodal.caches.checks import check_known, check_pairs, checked_hashes, one_or_more
from shmstore.multimodal.caches.counts import CacheInfo
from shmstore.multimodal.values.types import (
    MULTIMODAL,
    CacheTypes,
    ItemT,
    ProcessorInput,
    ProcessorOutput,
    ReceiverInput,
    UpdatesT,
)
from shmstore.refs import StoreHandle
from shmstore.store import Claim, ObjectStoreWriter
from shmstore.store.arguments import seconds_of
from shmstore.tiers import StoreTier


class Feature(Protocol):
    """What `get_and_update_features` reads and sets: `MultiModalFeatureSpec`, or an engine's own class."""

    data: Any
    identifier: str


FeatureT = TypeVar("FeatureT", bound=Feature)


@unnamed
class _Cache:
    types: CacheTypes[Any, Any] = MULTIMODAL
    """The engine's types of items and prompt updates."""

    def close(self) -> None:
        """Release what is outside this process; idempotent. Does nothing without a store."""

    def release(self, refs: Iterable[ReceiverInput[Any]]) -> int:
        """End the leases of a request that ends before it is read, and return how many were open; 0 without a store.

        P0 ends them for all workers, and a worker ends its own part. Takes what was sent of each item, which is the
        first part of each output. It is safe after the request was read, and twice. Raises TypeError for anything else,
        and has then changed nothing.
        """
        self.types.checked_sent(refs)
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Begun(list[bool | None], AbstractContextManager[Any]):
    """The answer of `begin` for each hash: True, cached; False, yours to make; None, another one makes it still.

    It has the claims on what is yours. Each ends when its item is stored, sent inline or refused; all end at the end of
    a `with` block, or as garbage. So keep it until then, and drop it if you fail.
    """

    def __init__(self, answers: Iterable[bool | None]) -> None:
        super().__init__(answers)
        self.claims: list[Claim] = []

    def __exit__(self, *exc: object) -> None:
        for claim in self.claims:
            claim.end()


class BaseMultiModalProcessorCache(_Cache, ABC, Generic[ItemT, UpdatesT]):
    """The cache of P0: input `(item, prompt_updates)` or None, output `(item or reference or None, prompt_updates)`.

    Implementations are thread-safe, because an API server calls from a pool of threads.
    """

    handle: StoreHandle | None = None
    """The handle with which workers attach; None without a store."""
    writer: ObjectStoreWriter | None = None
    """The store's writer, for its statistics; None without a store."""
    tier: StoreTier | None = None
    """What is asked for items of other hosts, for its statistics; None without a tier."""
    inline_full: int = 0
    """Number of items sent inline because the store was full of items that are still to be read."""
    inline_too_large: int = 0
    """Number of items sent inline because they were too large for the store."""
    inline_late: int = 0
    """Number of items sent inline because a tier that was given up may still write them."""

    @abstractmethod
    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether None is enough as input for this hash; changes neither order nor counts."""

    @abstractmethod
    def get_and_update_item(
        self, mm_item: ProcessorInput[ItemT, UpdatesT], mm_hash: str
    ) -> ProcessorOutput[ItemT, UpdatesT]:
        """Return what to send of this item, and record it as sent; CacheMissError for None if nothing is cached."""

    @abstractmethod
    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; ignore an absent one."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""

    @abstractmethod
    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Do `is_cached_item` for each; TypeError for a wrong hash."""
        return [self.is_cached_item(mm_hash) for mm_hash in checked_hashes(mm_hashes)]

    def begin(self, mm_hashes: Sequence[str], *, wait: float = 1.0) -> Begun:
        """Do `is_cached`, and claim the rest, so that one of those who share a store makes each item.

        Waits at most so many seconds for what another one makes, and not while this thread holds a claim. Without a
        store everything that is not cached is yours. Raises TypeError for a wrong hash.
        """
        seconds_of("wait", wait)
        return Begun(self.is_cached(mm_hashes))

    def get_and_update(
        self, mm_items: Sequence[ProcessorInput[ItemT, UpdatesT]], mm_hashes: Sequence[str]
    ) -> list[ProcessorOutput[ItemT, UpdatesT]]:
        """Do `get_and_update_item` for each; cached items are touched before anything is stored.

        Raises ValueError if the lengths differ, TypeError for a wrong input or hash, and CacheMissError with all
        missing hashes of the batch; nothing has changed then. If an item fails later, the caches of this package undo
        the batch, and one that inherits this method has recorded the items before it.
        """
        check_pairs(mm_items, mm_hashes, self.types.check_input)
        check_known(mm_items, mm_hashes, self.is_cached_item)
        for mm_hash in mm_hashes:
            self.touch_sender_cache_item(mm_hash)
        given: dict[str, ProcessorInput[ItemT, UpdatesT]] = {}
        outputs = []
        for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            if mm_item is not None:
                given[mm_hash] = mm_item
            outputs.append(self.get_and_update_item(given.get(mm_hash), mm_hash))
        return outputs

    def assign_group(self, sent: Iterable[ReceiverInput[ItemT]], engine: int) -> int:
        """Say, before it is sent, which engine core gets what was sent of each item; 0 without a store.

        `engine` is its number from 0 to `data_parallel_size` - 1. Returns the number of references whose items stay for
        the workers of this core only; those of references without a group stay for the workers of all. Raises
        TypeError as `release` does, and has then changed nothing.
        """
        self.types.checked_sent(sent)
        return 0

    def invalidate(self, mm_hashes: str | Iterable[str]) -> None:
        """Send the `mm_hashes` of a `CacheMissError`, with which a receiver has rejected a request, again.

        Raises TypeError for a wrong hash. Does nothing if every item is sent every time.
        """
        one_or_more(mm_hashes)


class BaseMultiModalReceiverCache(_Cache, ABC, Generic[ItemT]):
    """The cache of P1 or of a worker: it turns what arrives into items. Thread-safe."""

    @abstractmethod
    def get_and_update_item(self, mm_item: ReceiverInput[ItemT], mm_hash: str) -> ItemT:
        """Return the item, and record it if it arrived; CacheMissError for None if nothing is cached."""

    @abstractmethod
    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput[ItemT] = None) -> None:
        """Mark the item as just used; ignore an absent one. `mm_item` is what arrived of it."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget all items."""

    def get_and_update(self, mm_items: Sequence[ReceiverInput[ItemT]], mm_hashes: Sequence[str]) -> list[ItemT]:
        """Do `get_and_update_item` for each, in order; all are touched first.

        Raises ValueError if the lengths differ, and TypeError for a wrong hash or item. The CacheMissError of this
        package's caches has all missing hashes of the batch, and nothing has changed then.
        """
        check_pairs(mm_items, mm_hashes, lambda mm_item, mm_hash: None)  # the method for one item checks items
        for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            self.touch_receiver_cache_item(mm_hash, mm_item)
        return [
            self.get_and_update_item(mm_item, mm_hash) for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
        ]

    def get_and_update_features(self, features: Sequence[FeatureT]) -> Sequence[FeatureT]:
        """Replace each feature's `data` by its item and return `features`.

        All identifiers are touched first, so that no item of the batch evicts another. An error leaves every feature
        as it was. Raises TypeError for a wrong feature, before anything is changed.
        """
        try:
            arrived = [feature.data for feature in features]
            identifiers = [feature.identifier for feature in features]
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"features must be a sequence of MultiModalFeatureSpec, or of objects with data and identifier: {error}"
            ) from None
        items = self.get_and_update(arrived, identifiers)
        try:
            for feature, item in zip(features, items, strict=True):
                feature.data = item
        except BaseException:
            for feature, before in zip(features, arrived, strict=True):
                if feature.data is not before:
                    feature.data = before
            raise
        return features
