"""Values to bytes and back: msgpack stores containers and scalars, tensors and arrays lie out of band.

A store uses `MsgpackSerde` by default, and `register_type` adds types to it. `ObjectSerde` is the protocol for other
serializers. `TensorSpec` describes a leaf that has no bytes yet.
"""

from shmstore.serde import builtin_types  # noqa: F401 - it registers types
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
