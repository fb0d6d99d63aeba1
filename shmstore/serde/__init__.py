"""Values to bytes and back: trees of containers and scalars by msgpack, tensors and arrays out of band.

`MsgpackSerde` is what a store uses by default; `register_type` teaches it further types, `ObjectSerde` is the
protocol for serializers of one's own, `TensorSpec` describes a leaf that is still to be written.
"""

from shmstore.serde import builtin_types  # noqa: F401 - registers them
from shmstore.serde.msgpack_serde import MsgpackSerde
from shmstore.serde.pickle_serde import PickleSerde
from shmstore.serde.protocol import ALIGNMENT, Encoded, Layout, ObjectSerde, TensorSpec
from shmstore.serde.registry import register_type

__all__ = [
    "ALIGNMENT",
    "Encoded",
    "Layout",
    "MsgpackSerde",
    "ObjectSerde",
    "PickleSerde",
    "TensorSpec",
    "register_type",
]
