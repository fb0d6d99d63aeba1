"""What caches and tiers need of a writer besides its public calls: parts of their own batches, and a tier's words.

Nobody else may use it, and nobody outside this folder may reach a private attribute of a writer in another way;
tests/test_layers.py looks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from shmstore.bindings.store import Writer
from shmstore.errors import ShmStoreError
from shmstore.refs import ObjectRef
from shmstore.serde import ObjectSerde
from shmstore.store.writer import ObjectStoreWriter


class Internals(NamedTuple):
    """The inside of a writer."""

    native: Writer
    """Batches (`batch`, `new_batch`, `spare`), look-ups by packed key, and the words of a tier."""
    put: Callable[..., ObjectRef]
    """`put` of an encoded value as a part of a batch, with extra bytes after the object that no reader gets."""
    explain: Callable[..., ShmStoreError]
    """What `put` raises for a refusal: the same error, with who holds what."""
    hand_out: Callable[..., ObjectRef]
    """`get_cached` as a part of a batch."""
    equals: Callable[[ObjectRef, Any], bool]
    """Whether an object that was just handed out is what `put` of a value would store."""
    serde: ObjectSerde
    """The serializer."""
    look_or_claim: Callable[..., Any]
    """What `find_or_claim` does before it finds, with another way to look."""


def internals_of(writer: ObjectStoreWriter) -> Internals:
    """Return the inside of an open writer."""
    inside: Any = writer
    return Internals(
        inside._writer,
        inside._put,
        inside._explain,
        inside._hand_out,
        inside._equals,
        inside._serde,
        inside._look_or_claim,
    )
