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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from shmstore.errors import CacheMissError, shown
from shmstore.multimodal.caches.lru import CacheInfo
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalFeatureSpec, MultiModalKwargsItem, ResolvedPromptUpdate
from shmstore.refs import ObjectRef, StoreHandle

__all__ = [
    "MAX_HASH",
    "BaseMultiModalProcessorCache",
    "BaseMultiModalReceiverCache",
    "ProcessorInput",
    "ProcessorOutput",
    "ReceiverInput",
    "check_batch",
    "check_config",
    "check_hash",
    "check_hashes",
    "check_input",
    "check_item",
    "check_pairs",
    "checked_hashes",
    "checked_sent",
]

MAX_HASH = 65536
"""Bytes of a hash in UTF-8: the store's own bound for its keys; a test compares them."""

PromptUpdates: TypeAlias = Sequence[ResolvedPromptUpdate]
ProcessorInput: TypeAlias = tuple[MultiModalKwargsItem, PromptUpdates] | None
"""What P0 has of an item: it and its prompt updates, or None where `is_cached_item` said that it need not."""
ProcessorOutput: TypeAlias = tuple[MultiModalKwargsItem | ObjectRef | None, PromptUpdates]
"""What P0 sends of an item (itself, a reference, nothing), and the prompt updates, which stay in P0."""
ReceiverInput: TypeAlias = MultiModalKwargsItem | ObjectRef | None
"""What arrives of an item."""


def check_batch(
    items: Sequence[object],
    mm_hashes: Sequence[str],
    known: Callable[[str], bool],
    check: Callable[[Any, str], None],
) -> None:
    """Reject a batch before anything is changed.

    ValueError where the lengths differ or a hash is no key, TypeError for a hash that is none and for what
    `check(item, mm_hash)` rejects, CacheMissError naming every hash whose item is None and is neither `known` nor given
    earlier in the batch.
    """
    check_pairs(items, mm_hashes, check)
    check_known(items, mm_hashes, known)


def check_known(items: Sequence[object], mm_hashes: Sequence[str], known: Callable[[str], bool]) -> None:
    """The last part of `check_batch`."""
    given: set[str] = set()
    missing: dict[str, None] = {}
    for item, mm_hash in zip(items, mm_hashes, strict=True):
        if item is not None:
            given.add(mm_hash)
        elif mm_hash not in given and not known(mm_hash):
            missing[mm_hash] = None
    if missing:
        raise CacheMissError(missing)


def check_pairs(items: Sequence[object], mm_hashes: Sequence[str], check: Callable[[Any, str], None]) -> None:
    """ValueError where there is not one hash for each item; TypeError for what is no hash or, by `check`, no item."""
    check_hashes(mm_hashes)
    if len(items) != len(mm_hashes):
        raise ValueError(f"{len(items)} items but {len(mm_hashes)} hashes")
    _check_each(mm_hashes)
    for item, mm_hash in zip(items, mm_hashes, strict=True):
        check(item, mm_hash)


def _check_each(mm_hashes: Sequence[str]) -> None:
    for index, mm_hash in enumerate(mm_hashes):
        if type(mm_hash) is not str or not mm_hash.isascii() or not 0 < len(mm_hash) <= MAX_HASH:
            check_hash(mm_hash, f"mm_hashes[{index}]" if len(mm_hashes) > 1 else "mm_hash")


def check_hash(mm_hash: object, name: str = "mm_hash") -> None:
    """TypeError for what is no text, ValueError for a text that no store could have as a key; alike in every mode."""
    if type(mm_hash) is str and mm_hash.isascii() and 0 < len(mm_hash) <= MAX_HASH:
        return  # nearly all of them
    if not isinstance(mm_hash, str):
        raise TypeError(f"expected a str as {name}, got {_kind(mm_hash)}")
    try:
        size = len(mm_hash.encode())
    except UnicodeEncodeError:
        raise ValueError(f"expected a str that UTF-8 can encode as {name}, got {shown(mm_hash)}") from None
    if not 0 < size <= MAX_HASH:
        raise ValueError(f"expected a str of 1 to {MAX_HASH} bytes in UTF-8 as {name}, got one of {size}")


def check_hashes(mm_hashes: object) -> None:
    """TypeError for what is no sequence, and for one hash where several are expected: it would be taken for letters."""
    if type(mm_hashes) is list:
        return
    if isinstance(mm_hashes, (str, bytes)) or not isinstance(mm_hashes, Iterable):
        one = "one " if isinstance(mm_hashes, (str, bytes)) else ""
        raise TypeError(f"expected a sequence of hashes as mm_hashes, got {one}{_kind(mm_hashes)}")


def check_config(config: object) -> None:
    """TypeError for what is no configuration."""
    if not isinstance(config, MultiModalCacheConfig):
        raise TypeError(f"config must be a MultiModalCacheConfig, not {type(config).__name__}")


def checked_hashes(mm_hashes: Iterable[str]) -> list[str]:
    """The hashes; TypeError, before the first is used, where one is none or there is but one."""
    check_hashes(mm_hashes)
    hashes = list(mm_hashes)
    _check_each(hashes)
    return hashes


def checked_sent(refs: Iterable[ReceiverInput]) -> list[ReceiverInput]:
    """What `release` is given; TypeError, before the first is used, for what was never sent, such as a whole output."""
    takes = "release takes what was sent: ObjectRef, MultiModalKwargsItem or None"
    if isinstance(refs, (ObjectRef, MultiModalKwargsItem, str, bytes)) or not isinstance(refs, Iterable):
        raise TypeError(f"{takes}, several in a list; got one {_kind(refs)}")
    sent = list(refs)
    for index, ref in enumerate(sent):
        if ref is not None and not isinstance(ref, (ObjectRef, MultiModalKwargsItem)):
            raise TypeError(f"{takes}, the first of each output; got {_kind(ref)} as refs[{index}]")
    return sent


def check_input(mm_item: ProcessorInput, mm_hash: str) -> None:
    """TypeError for what is neither None nor an item and a sequence of its prompt updates."""
    if mm_item is None:
        return
    if isinstance(mm_item, tuple) and len(mm_item) == 2:
        item, updates = mm_item
        if isinstance(item, MultiModalKwargsItem) and isinstance(updates, Sequence) and not isinstance(updates, str):
            for index, update in enumerate(updates):
                if not isinstance(update, ResolvedPromptUpdate):
                    raise TypeError(
                        f"input of {shown(mm_hash)}: expected a ResolvedPromptUpdate as prompt update {index}, "
                        f"got {_kind(update)}"
                    )
            return
        got = f"({_kind(item)}, {_kind(updates)})"
    elif isinstance(mm_item, tuple):
        got = f"a tuple of {len(mm_item)}"
    else:
        got = _kind(mm_item)
    raise TypeError(
        f"input of {shown(mm_hash)}: expected None or a tuple (MultiModalKwargsItem, sequence of prompt updates), "
        f"got {got}"
    )


def check_item(mm_item: MultiModalKwargsItem | None, mm_hash: str) -> None:
    """TypeError for what is neither None nor an item."""
    if mm_item is not None and not isinstance(mm_item, MultiModalKwargsItem):
        hint = " (hint: the first member of an output alone, without the prompt updates)"
        raise TypeError(
            f"item of {shown(mm_hash)}: expected None or a MultiModalKwargsItem, got {_kind(mm_item)}"
            f"{hint if isinstance(mm_item, tuple) else ''}"
        )


def _no_features(features: object) -> TypeError:
    said = "expected a sequence of MultiModalFeatureSpec as features, got"
    if not isinstance(features, Iterable):
        return TypeError(f"{said} {_kind(features)}")
    wrong = (one for one in features if not (hasattr(one, "data") and hasattr(one, "identifier")))
    return TypeError(f"{said} one with {_kind(next(wrong, None))} in it (hint: a feature's data is what was sent)")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


class _NoStore:
    """`handle` of a cache without a store. No property: a subclass may set an attribute of that name."""

    def __get__(self, cache: object, owner: object) -> StoreHandle | None:
        return None


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
            """What the workers attach with; None where there is no store."""
    else:
        handle = _NoStore()

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
            raise _no_features(features) from None
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
