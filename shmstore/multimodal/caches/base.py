"""The two interfaces of the multi-modal caches, for those who use one and for those who write one.

P0, the API server, has a `BaseMultiModalProcessorCache`: it is asked before preprocessing what need not be
preprocessed, and takes and returns what is. P1, the engine core, and the workers have a
`BaseMultiModalReceiverCache`: it turns what arrives into items. For each request the order is

    P0: is_cached → preprocess the rest → get_and_update → send the outputs as `MultiModalFeatureSpec.data`
    P1 or worker: get_and_update_features → the model

What ends early, is rejected, or ends for good has one name in every mode, too, and does nothing where there is nothing
to do: `release`, `invalidate`, `close`. So an engine need not ask which cache it was given.

An implementation needs the methods for one item; the batch methods here are made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from shmstore.multimodal.caches.checks import (
    check_batch,
    check_input,
    check_pairs,
    checked_hashes,
    checked_sent,
    no_features,
)
from shmstore.multimodal.caches.lru import CacheInfo
from shmstore.multimodal.values.items import MultiModalFeatureSpec, MultiModalKwargsItem
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, ReceiverInput
from shmstore.refs import StoreHandle

if TYPE_CHECKING:
    from shmstore.store import ObjectStoreWriter

__all__ = ["BaseMultiModalProcessorCache", "BaseMultiModalReceiverCache"]


class BaseMultiModalProcessorCache(ABC):
    """The cache of P0: input `(item, prompt_updates)` or None, output `(item or reference or None, prompt_updates)`.

    Implementations are thread-safe: an API server calls from a pool of threads.
    """

    @abstractmethod
    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether None will do as input for this hash; changes neither order nor counts, however often it is asked."""

    @abstractmethod
    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """What to send of this item, recording that it was; CacheMissError for None where nothing is cached."""

    @abstractmethod
    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""

    @abstractmethod
    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """`is_cached_item` of each; TypeError for a hash that is none."""
        return [self.is_cached_item(mm_hash) for mm_hash in checked_hashes(mm_hashes)]

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, the items that are cached being touched before the first is stored.

        ValueError where the lengths differ, TypeError for an input or a hash that is none, CacheMissError with all
        missing hashes of the batch, all before anything is changed. The caches of this package also undo the batch
        where an item fails later; one that is made of this method alone has then recorded the items before it.
        """
        check_batch(mm_items, mm_hashes, self.is_cached_item, check_input)
        for mm_hash in mm_hashes:
            self.touch_sender_cache_item(mm_hash)
        given: dict[str, ProcessorInput] = {}
        outputs = []
        for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            if mm_item is not None:
                given[mm_hash] = mm_item
            outputs.append(self.get_and_update_item(given.get(mm_hash), mm_hash))
        return outputs

    if TYPE_CHECKING:

        @property
        def handle(self) -> StoreHandle | None:
            """What the workers attach with; None without a store."""

        @property
        def writer(self) -> ObjectStoreWriter | None:
            """The store's writer, for its statistics; None without a store."""

        @property
        def inline_full(self) -> int:
            """How many items went inline because the store was full; 0 without a store."""

        @property
        def inline_too_large(self) -> int:
            """How many items went inline because they were too large for the store; 0 without a store."""
    else:  # not properties: a subclass may set an attribute of one of these names
        handle = writer = None
        inline_full = inline_too_large = 0

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """A request ended before what it sent was read: give back what that still holds; how many leases it ended.

        Takes what was sent of each item, in any mode: the first of each output. Safe after it was read, and twice.
        TypeError, with nothing given back, for anything else. Where nothing is lent there is nothing to do: 0.
        """
        checked_sent(refs)
        return 0

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """A receiver has rejected a request with `CacheMissError`: send its `mm_hashes` again when next asked.

        TypeError for a hash that is none. Where every item is sent every time there is nothing to do.
        """
        checked_hashes(mm_hashes)

    def close(self) -> None:  # noqa: B027 - not every cache has something to do
        """Let go what lies outside this process; idempotent. Without a store there is nothing to do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BaseMultiModalReceiverCache(ABC):
    """The cache of P1 or of a worker: whatever arrives goes in, items come out. Thread-safe."""

    @abstractmethod
    def get_and_update_item(self, mm_item: ReceiverInput, mm_hash: str) -> MultiModalKwargsItem:
        """The item, recording it if it came; CacheMissError for None where nothing is cached."""

    @abstractmethod
    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput = None) -> None:
        """Mark the item as just used; absent: nothing. `mm_item` is what arrived of it."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget all items."""

    def get_and_update(self, mm_items: Sequence[ReceiverInput], mm_hashes: Sequence[str]) -> list[MultiModalKwargsItem]:
        """`get_and_update_item` of each, in order, all of them being touched first.

        ValueError where the lengths differ, TypeError for a hash that is none. The caches of this package raise
        TypeError for what is no item, too, and CacheMissError with all missing hashes of the batch, with nothing
        changed; one that is made of this method alone, at the first.
        """
        check_pairs(mm_items, mm_hashes, lambda mm_item, mm_hash: None)  # what it takes, the method for one item knows
        for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            self.touch_receiver_cache_item(mm_hash, mm_item)
        return [
            self.get_and_update_item(mm_item, mm_hash) for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
        ]

    def get_and_update_features(self, features: Sequence[MultiModalFeatureSpec]) -> Sequence[MultiModalFeatureSpec]:
        """Replace each feature's `data` by its item and return `features`.

        All identifiers are touched before the first is replaced, so that no item of the batch pushes out another one
        of it. An error leaves every feature as it was; TypeError for what is no feature, before anything is changed.
        """
        try:
            arrived = [feature.data for feature in features]
            identifiers = [feature.identifier for feature in features]
        except (AttributeError, TypeError):
            raise no_features(features) from None
        items = self.get_and_update(arrived, identifiers)
        for feature, item in zip(features, items, strict=True):
            feature.data = item
        return features

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """A request ended before it was read here: this process will not read what was sent; how much still waited.

        Takes what arrived of each item, in any mode. Safe after it was read, and twice. TypeError, with nothing
        changed, for anything else. Where nothing waits for this process there is nothing to do: 0.
        """
        checked_sent(refs)
        return 0

    def close(self) -> None:  # noqa: B027 - not every cache has something to do
        """Let go what lies outside this process; idempotent. Without a store there is nothing to do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
