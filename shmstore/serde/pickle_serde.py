"""`PickleSerde`: stores any Python object, slowly and at a risk."""

import pickle
from typing import Any

import msgpack

from shmstore.errors import CorruptStoreError, NestingError, UnsupportedValueError, check_flags, cut, unless_interrupted
from shmstore.serde.protocol import Encoded, Layout
from shmstore.serde.wire import PICKLE, parse


class PickleSerde:
    """Stores any value that pickles; it is never a default.

    **Risk: unpickling runs code that the bytes name.** A process that can write to the segment can run any code in
    every reader. Use it only if all processes that share the store trust each other fully.

    It is also slow. It pickles the whole value to one byte string and copies it into the store. Each `get` makes a
    private copy with the GIL held.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "PickleSerde()"

    def encode(self, value: Any) -> Encoded:
        """Pickle `value`.

        Raises UnsupportedValueError (TypeError) if pickle refuses it, and NestingError if it is too deep.
        """
        try:
            data = pickle.dumps(value, protocol=5)
        except RecursionError as error:
            raise NestingError() from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UnsupportedValueError(f"value: pickle refuses the value: {cut(error)}", path="value") from error
        meta = msgpack.packb(msgpack.ExtType(PICKLE, len(data).to_bytes(8, "little")))
        return Encoded(meta, len(data), (), ((0, len(data), data),), data)

    def fill(self, dst: Any, source: Any) -> None:
        """Copy the pickled bytes."""
        memoryview(dst).cast("B")[:] = source

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        """Return a private copy of the value, with or without `copy`; **runs code that the bytes name**."""
        check_flags(copy=copy)
        size = len(payload)
        ext = parse(meta, msgpack.ExtType)
        if type(ext) is not msgpack.ExtType or ext.code != PICKLE or len(ext.data) != 8:
            raise CorruptStoreError("the meta bytes were not written by PickleSerde")
        nbytes = int.from_bytes(ext.data, "little")
        if nbytes > size:
            raise CorruptStoreError(f"the payload has {size} bytes, and the meta bytes describe {nbytes}")
        try:
            return pickle.loads(memoryview(payload)[:nbytes])
        except unless_interrupted(Exception) as error:  # a damaged pickle can raise any error
            raise CorruptStoreError(f"unpickling failed: {type(error).__name__}: {cut(error)}") from error

    def layout(self, template: Any) -> Layout:
        """Raise UnsupportedValueError, because pickled bytes have no places for leaves."""
        raise UnsupportedValueError(
            "value: PickleSerde cannot lay out a template", path="value", hint="use MsgpackSerde for reserve()"
        )
