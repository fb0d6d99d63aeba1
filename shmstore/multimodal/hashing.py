"""`hash_item`: one name for equal content, different names for different content.

Every part goes into the hash as  tag (1 byte) | length of the body (8 bytes) | body,  and a container's body is the
number of its parts, followed by the parts. So no two different trees give the same stream: neither ["ab"] and
["a", "b"], nor 1 and True and 1.0 and "1", nor the same bytes as float16 and as bfloat16, nor a list and a tuple.
Dictionaries and keyword arguments are taken in the order of their encoded keys, since equal dictionaries may have
been filled in different orders. Memory layout is no content: a transposed view hashes like its contiguous copy.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from shmstore.multimodal.items import MultiModalKwargsItem

__all__ = ["hash_item"]


class _Hasher(Protocol):
    def update(self, data: Any, /) -> object: ...
    def hexdigest(self) -> str: ...


def _new_hasher() -> Callable[[], _Hasher]:
    try:
        from blake3 import blake3
    except ImportError:
        return hashlib.sha256
    return blake3  # type: ignore[no-any-return]


_hasher = _new_hasher()
_pack_length = struct.Struct("<Q").pack
_pack_float = struct.Struct("<d").pack


def hash_item(value: object, **kwargs: object) -> str:
    """The content hash of `value`, and of the keyword arguments that the processor is given, in hex (64 digits).

    Takes None, bool, int, float, complex, str, bytes, tensors, arrays, Pillow images, items, and lists, tuples and
    dicts of them; TypeError naming the path to anything else. BLAKE3 where its package is installed, else SHA-256:
    processes that compare hashes must agree on that.
    """
    hasher = _hasher()
    _feed(hasher, value, "value")
    _feed(hasher, kwargs, "kwargs")
    return hasher.hexdigest()


def _frame(hasher: _Hasher, tag: bytes, body: Any, nbytes: int) -> None:
    hasher.update(tag + _pack_length(nbytes))
    hasher.update(body)


def _feed_bytes(hasher: _Hasher, tag: bytes, body: bytes) -> None:
    _frame(hasher, tag, body, len(body))


def _feed_tensor(hasher: _Hasher, tensor: torch.Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"{path}: cannot hash a tensor that is sparse, quantised or without data")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    _feed_bytes(hasher, b"T", f"{plain.dtype}{tuple(plain.shape)}".encode())
    _frame(hasher, b"d", plain.reshape(-1).view(torch.uint8).numpy().data, plain.nbytes)


def _feed_array(hasher: _Hasher, array: np.ndarray[Any, Any], path: str) -> None:
    if array.dtype.hasobject:
        raise TypeError(f"{path}: cannot hash an array of objects")
    dtype = repr(array.dtype.descr) if array.dtype.names else array.dtype.str
    plain = np.ascontiguousarray(array)
    _feed_bytes(hasher, b"A", f"{dtype}{array.shape}".encode())
    _frame(hasher, b"d", plain.reshape(-1).view(np.uint8).data, plain.nbytes)


def _feed_image(hasher: _Hasher, image: Any) -> None:
    # What a processor can see of an image: its pixels, what they mean (mode, palette, transparent colour), and the
    # orientation that it may be asked to apply.
    orientation = image.getexif().get(0x0112, 1)
    _feed_bytes(hasher, b"P", f"{image.mode}{image.size}{orientation}".encode())
    _feed_bytes(hasher, b"p", repr((image.getpalette(), image.info.get("transparency"))).encode())
    _feed_bytes(hasher, b"d", image.tobytes())


def _feed_pairs(hasher: _Hasher, tag: bytes, pairs: dict[Any, Any], path: str) -> None:
    encoded = []
    for key, value in pairs.items():
        if not isinstance(key, (str, bytes, int, float, tuple, type(None))):
            raise TypeError(f"{path}: cannot hash a key of {type(key).__name__}")
        recorder = _Recorder()
        _feed(recorder, key, f"{path}[{key!r}]")
        encoded.append((bytes(recorder.stream), key, value))
    encoded.sort(key=lambda entry: entry[0])
    hasher.update(tag + _pack_length(len(encoded)))
    for stream, key, value in encoded:
        hasher.update(stream)
        _feed(hasher, value, f"{path}[{key!r}]")


class _Recorder:
    def __init__(self) -> None:
        self.stream = bytearray()

    def update(self, data: Any, /) -> None:
        self.stream += data

    def hexdigest(self) -> str:
        return self.stream.hex()


def _is_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # a value of its type cannot exist before it is imported
    return pillow is not None and isinstance(value, pillow.Image)


def _feed(hasher: _Hasher, value: Any, path: str) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value, path)
    elif isinstance(value, np.ndarray):
        _feed_array(hasher, value, path)
    elif isinstance(value, np.generic) and not isinstance(value, (str, bytes)):
        _feed_array(hasher, np.asarray(value), path)
    elif value is None:
        hasher.update(b"N")
    elif isinstance(value, bool):
        hasher.update(b"+" if value else b"-")
    elif isinstance(value, int):
        _feed_bytes(hasher, b"I", b"%d" % value)
    elif isinstance(value, float):
        _feed_bytes(hasher, b"F", _pack_float(value))
    elif isinstance(value, complex):
        _feed_bytes(hasher, b"C", _pack_float(value.real) + _pack_float(value.imag))
    elif isinstance(value, str):
        _feed_bytes(hasher, b"S", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _feed_bytes(hasher, b"B", bytes(value))
    elif isinstance(value, (list, tuple)):
        hasher.update((b"L" if isinstance(value, list) else b"U") + _pack_length(len(value)))
        for index, part in enumerate(value):
            _feed(hasher, part, f"{path}[{index}]")
    elif isinstance(value, dict):
        _feed_pairs(hasher, b"D", value, path)
    elif isinstance(value, MultiModalKwargsItem):
        _feed_bytes(hasher, b"M", value.modality.encode())
        _feed_pairs(hasher, b"D", value.get_data(), path)
    elif _is_image(value):
        _feed_image(hasher, value)
    else:
        raise TypeError(f"{path}: cannot hash {type(value).__name__}")
