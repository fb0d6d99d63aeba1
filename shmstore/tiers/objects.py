"""An object as a value of a tier: a head with its metadata, then its payload.

    head:     magic (8) | payload bytes (8) | moment (8) | meta bytes (4) | extra bytes (4) | CRC of the payload (4)
              | CRC of the key and of all before and after (4) | meta | extra
    payload:  as in the store

Both are spans of their own, so the payload goes straight from the arena of one host into the arena of another. `extra`
is what a cache stores after an item. The moment is when it was published, in ns since 1970 by the clock of its host.
Numbers are little-endian, and checksums are CRC-32C. A head or payload that does not verify is a miss, so an object is
as it was put or it is not there.
"""

import struct
import urllib.parse
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from shmstore.bindings.batch import put_options
from shmstore.bindings.hidden import hidden
from shmstore.bindings.inspect import crc32c
from shmstore.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError, StoreFullError
from shmstore.serde import MsgpackSerde, ObjectSerde
from shmstore.store import ObjectStoreWriter
from shmstore.store.arguments import packed_key
from shmstore.store.batch import internals_of

FORMAT = 1
"""Part of every key: a fleet with two formats reads its own only."""
_MAGIC = b"shmtier" + bytes([FORMAT])
_HEAD = struct.Struct("<8sQQIII")
_CRC = struct.Struct("<I")
_LONGEST = 200


def serializer_of(serde: ObjectSerde) -> str:
    """Return the name of the format of a serializer's bytes: its `format_name`. Raises TypeError if it has none.

    Without a name two versions of a fleet would read each other's bytes wrongly. `PickleSerde` has none, because bytes
    of a network are not to be unpickled.
    """
    name = "msgpack1" if type(serde) is MsgpackSerde else getattr(serde, "format_name", None)
    if isinstance(name, str) and name.isascii() and name.isalnum():
        return name
    raise TypeError(
        f"{type(serde).__name__} cannot be used with a tier: its attribute format_name must name the format of its "
        "bytes, in ASCII letters and digits, and change with that format"
    )


def tier_key(key: str, namespace: str | None, serializer: str, tier_namespace: str = "") -> str:
    """Return the key of an object in a tier: printable ASCII of up to 200 characters.

    It has the format of this module, the serializer, and the namespaces of the tier and of the key, because objects
    with another one of these are other objects. A key that would be longer is replaced by its BLAKE2b hash.
    """
    parts = (
        urllib.parse.quote(part, safe="", errors="surrogatepass") for part in (tier_namespace, namespace or "", key)
    )
    whole = ":".join([f"shmstore{FORMAT}", serializer, *parts])
    if len(whole) <= _LONGEST:
        return whole
    return f"shmstore{FORMAT}:{serializer}:#{blake2b(whole.encode(), digest_size=32).hexdigest()}"


def spans_of(
    writer: ObjectStoreWriter, key: str, namespace: str | None, name: str, moment: int
) -> list[memoryview] | None:
    """Return head and payload of this writer's object, which is pinned while the payload is in use; None if absent."""
    packed = packed_key(key, namespace)
    native = internals_of(writer).native
    batch = native.new_batch()
    batch.protect([packed])
    try:
        meta, extra, buffer = native.look(packed, batch)
    except ObjectNotFoundError:
        return None
    payload = memoryview(hidden(buffer))
    head = _HEAD.pack(_MAGIC, len(payload), moment, len(meta), len(extra), crc32c(payload))
    crc = crc32c(name.encode(), head, meta, extra)
    return [memoryview(b"".join((head, _CRC.pack(crc), meta, extra))), payload.toreadonly()]


class Incoming:
    """An object on its way from a tier into a store; `into` is for `Tier.fetch`.

    Nobody can see the object before `commit`. Its space is free again when this object and the memory that `into` gave
    are garbage. So a back end that was too late may still write there.
    """

    def __init__(
        self,
        writer: ObjectStoreWriter,
        key: str,
        namespace: str | None,
        name: str,
        wanted: Callable[[int], bool],
        valid: Callable[[int], bool],
        accepts: Callable[[bytes], bool],
    ) -> None:
        self._native = internals_of(writer).native
        self._key = packed_key(key, namespace)
        self._name = name
        self._wanted = wanted
        self._valid = valid
        self._accepts = accepts
        self._head: bytearray | None = None
        self._crc = 0
        self._batch: Any = None
        self._payload: memoryview | None = None
        self.nbytes = 0
        """The size of the payload."""
        self.moment = 0
        """When it was published."""
        self.refused = "misses"
        """As what a fetch counts that ends early: "damaged" for a head that does not verify; "declined" if `wanted` did
        not want it, or the store had no room; "misses" if its moment was not `valid`, or the tier has no more of it."""

    def into(self, size: int) -> memoryview | None:
        """Return the memory for the head, and then for the payload if the head is whole; else None."""
        self.refused = "damaged"
        if self._head is None:
            if not 0 <= size - _HEAD.size - _CRC.size <= self._native.max_object_size:
                return None
            self._head = bytearray(size)
        elif self._payload is not None or not self._begin(size):
            return None
        self.refused = "misses"
        return memoryview(self._head) if self._payload is None else self._payload

    def _begin(self, size: int) -> bool:
        head = memoryview(self._head or b"")
        magic, nbytes, self.moment, n_meta, n_extra, self._crc = _HEAD.unpack_from(head)
        rest = _HEAD.size + _CRC.size
        if magic != _MAGIC or nbytes != size or n_meta + n_extra != len(head) - rest:
            return False
        (crc,) = _CRC.unpack_from(head, _HEAD.size)
        if crc != crc32c(self._name.encode(), head[: _HEAD.size], head[rest:]):
            return False
        if not self._valid(self.moment):
            self.refused = "misses"
            return False
        if not self._wanted(nbytes):
            self.refused = "declined"
            return False
        extra = bytes(head[rest + n_meta :])
        if not self._accepts(extra):
            return False
        batch = self._native.new_batch()
        try:
            batch.begin(self._key, bytes(head[rest : rest + n_meta]), nbytes, put_options(unleased=True), extra)
        except (StoreFullError, ObjectTooLargeError, ObjectExistsError):
            self.refused = "declined"
            return False
        self._batch, self.nbytes = batch, nbytes
        self._payload = memoryview(hidden(batch.buffer(owner=batch)))
        return True

    def verifies(self) -> bool:
        """Return whether all bytes are there, and those that were put."""
        return self._payload is not None and crc32c(self._payload) == self._crc

    def commit(self) -> None:
        """Publish the object, which can be handed out now."""
        self._batch.commit()
        self._batch.record.keep = 1
