"""What the caches take and give for each item, and what they must know about an engine's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Generic, TypeAlias

from typing_extensions import TypeVar

from shmstore.errors import kind_of, shown
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate, own_memory
from shmstore.multimodal.values.nested import nested_equal
from shmstore.multimodal.values.sizes import item_size, tree_size, updates_size
from shmstore.multimodal.values.updates import decode_updates, encode_updates
from shmstore.refs import ObjectRef

PromptUpdates: TypeAlias = Sequence[ResolvedPromptUpdate]
ItemT = TypeVar("ItemT", default=MultiModalKwargsItem)
UpdatesT = TypeVar("UpdatesT", default=PromptUpdates)

ProcessorInput: TypeAlias = tuple[ItemT, UpdatesT] | None
"""What P0 has of an item: the item and its prompt updates, or None if `is_cached_item` has said that it is cached."""
ProcessorOutput: TypeAlias = tuple[ItemT | ObjectRef | None, UpdatesT]
"""What P0 sends of an item (itself, a reference, nothing), and the prompt updates, which stay in P0."""
ReceiverInput: TypeAlias = ItemT | ObjectRef | None
"""What arrives of an item."""


def _same(value: Any) -> Any:
    return value


def _say_the_same(kept: PromptUpdates, given: PromptUpdates) -> bool:
    def says(updates: PromptUpdates) -> list[Any]:
        return [(each.modality, each.mode, each.target, each.content) for each in updates]  # the caller has the index

    return nested_equal(says(kept), says(given))


def _shallow_size(updates: object, mm_hash: str) -> int:
    return getsizeof(updates)


@dataclass(frozen=True, repr=False)
class CacheTypes(Generic[ItemT, UpdatesT]):
    """What the caches must know about an engine's items and prompt updates: `processor_cache_from_config(types=...)`.

    An item is any value that the store's serializer takes. Prompt updates may be any object: the caches do not look
    into them. With a codec for updates, `shm` stores them with their item, so that they survive the process. Without
    one, and where it fails, they are kept in P0.
    """

    item_type: type[ItemT]
    item_size: Callable[[ItemT, str], int] = tree_size
    """Bytes of an item, which `lru` counts in P0 and in P1; both must get the same. The str is the hash, for errors."""
    updates_size: Callable[[UpdatesT, str], int] = _shallow_size
    """Bytes of the prompt updates, counted against `processor_cache_gb`; TypeError if they are wrong."""
    keep_updates: Callable[[UpdatesT], Any] = _same
    """Turns updates into what is kept, if the caller may change them later."""
    give_updates: Callable[[Any], UpdatesT] = _same
    """Turns what is kept into the updates of an output."""
    encode_updates: Callable[[UpdatesT], bytes | None] | None = None
    """Turns updates into bytes that `shm` stores with the item; None for updates that cannot be written as data."""
    decode_updates: Callable[[bytes], UpdatesT] | None = None
    """Turns these bytes into updates, perhaps in a later process; an exception makes the item count as not cached."""
    modality: Callable[[ItemT, UpdatesT], str | None] = lambda item, updates: None
    """Names what an item is, such as "image": the kind of its object in `shm`, which `shmstore top` and quotas tell."""
    own_memory: Callable[[ItemT], ItemT] = _same
    """Returns the item with a copy of each tensor that may keep more memory than its own, for what is sent or kept."""
    same_updates: Callable[[Any, Any], bool] = nested_equal
    """Whether two updates as they are kept say the same of an item. `lru` sends an item again if they do not."""

    shares: Callable[[str], bool] = lambda mm_hash: True
    """Whether an item of this hash may be published to a tier, and fetched from one: all hosts mean the same by it."""

    def __post_init__(self) -> None:
        others: tuple[object, ...] = ([], "", b"", None, ObjectRef(bytes(40)))
        if any(isinstance(other, self.item_type) for other in others):
            raise ValueError(
                f"item_type must not be {self.item_type.__name__}: "
                "lists, str, bytes, None and references are told apart from items"
            )
        if (self.encode_updates is None) != (self.decode_updates is None):
            raise ValueError("pass both encode_updates and decode_updates, or neither")

    def __repr__(self) -> str:
        return f"CacheTypes({self.item_type.__name__})"

    def alone(self, mm_item: tuple[ItemT, UpdatesT]) -> tuple[ItemT, UpdatesT]:
        """Return the input with its item in memory of its own, because a view is pickled with all that it views."""
        item, updates = mm_item
        alone = self.own_memory(item)
        return mm_item if alone is item else (alone, updates)

    def check_input(self, mm_item: object, mm_hash: str) -> None:
        """Raise TypeError if this is neither None nor an item with its prompt updates."""
        if mm_item is None:
            return
        got = f"tuple of {len(mm_item)}" if isinstance(mm_item, tuple) else kind_of(mm_item)
        if isinstance(mm_item, tuple) and len(mm_item) == 2:
            item, updates = mm_item
            if isinstance(item, self.item_type):
                self.updates_size(updates, mm_hash)
                return
            got = f"({kind_of(item)}, {kind_of(updates)})"
        raise TypeError(
            f"input of {shown(mm_hash)}: must be None or a tuple ({self.item_type.__name__}, prompt updates), not {got}"
        )

    def check_item(self, mm_item: object, mm_hash: str) -> None:
        """Raise TypeError if this is neither None nor an item."""
        if mm_item is not None and not isinstance(mm_item, self.item_type):
            hint = " (hint: pass the first part of an output, without the prompt updates)"
            raise TypeError(
                f"item of {shown(mm_hash)}: must be None or an item ({self.item_type.__name__}), not {kind_of(mm_item)}"
                f"{hint if isinstance(mm_item, tuple) else ''}"
            )

    def checked_sent(self, refs: Iterable[ReceiverInput[ItemT]]) -> list[ReceiverInput[ItemT]]:
        """Return the argument of `release`, or raise TypeError for what was not sent, such as a whole output."""
        takes = f"refs must be what was sent (ObjectRef, {self.item_type.__name__} or None)"
        if isinstance(refs, (ObjectRef, self.item_type, str, bytes)) or not isinstance(refs, Iterable):
            raise TypeError(f"{takes} in a list, not one {kind_of(refs)}")
        sent = list(refs)
        for index, ref in enumerate(sent):
            if ref is not None and not isinstance(ref, (ObjectRef, self.item_type)):
                raise TypeError(f"{takes}, the first part of each output; refs[{index}] is {kind_of(ref)}")
        return sent


MULTIMODAL: CacheTypes[Any, Any] = CacheTypes(
    MultiModalKwargsItem,
    item_size,
    updates_size,
    keep_updates=tuple,  # the caller may change its list
    give_updates=list,
    encode_updates=encode_updates,
    decode_updates=decode_updates,
    modality=lambda item, updates: item._modality,
    own_memory=own_memory,
    same_updates=_say_the_same,
)
"""The types of this package."""
