"""What the caches take and give for each item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate
from shmstore.refs import ObjectRef

__all__ = ["ProcessorInput", "ProcessorOutput", "PromptUpdates", "ReceiverInput"]

PromptUpdates: TypeAlias = Sequence[ResolvedPromptUpdate]
ProcessorInput: TypeAlias = tuple[MultiModalKwargsItem, PromptUpdates] | None
"""What P0 has of an item: it and its prompt updates, or None if `is_cached_item` said that None is enough."""
ProcessorOutput: TypeAlias = tuple[MultiModalKwargsItem | ObjectRef | None, PromptUpdates]
"""What P0 sends of an item (itself, a reference, nothing), and the prompt updates, which stay in P0."""
ReceiverInput: TypeAlias = MultiModalKwargsItem | ObjectRef | None
"""What arrives of an item."""
