"""`hash_item`: equal hashes for equal content, different hashes for different content.

Each part is hashed as  tag (1 byte) | length of the body (8 bytes) | body.  A container is hashed as its tag and the
number of its parts, followed by the parts. Different trees therefore give different streams. Examples are ["ab"] and
["a", "b"], 1 and True and 1.0 and "1", a list and a tuple, and the same bytes as float16 and as bfloat16.

Dicts and keyword arguments are hashed in the order of their encoded keys, because equal dicts may have different
orders. Memory layout is not content: a transposed view hashes like its contiguous copy. Dtypes in which some bytes may
belong to no value are refused.

An image of several frames is refused: a caller may mean the current frame or all of them, and reading all would change
the caller's image, which would move to another frame and lose what was drawn on it.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import PurePath, PureWindowsPath
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch

from shmstore.errors import NestingError, cut, shown, unless_interrupted
from shmstore.multimodal.values.items import MultiModalKwargsItem

T = TypeVar("T")
Algorithm = Literal["blake3", "sha256", "sha512"]
_Write: TypeAlias = Callable[[Any], object]
"""`update` of a hasher."""


def _find_hashers() -> dict[str | None, Callable[[], Any]]:
    """Return what makes a hasher, by name; None is the default."""
    hashers: dict[str | None, Callable[[], Any]] = {"sha256": hashlib.sha256, "sha512": hashlib.sha512}
    try:
        from blake3 import blake3
    except ImportError:
        return {None: hashlib.sha256, **hashers}
    return {None: blake3, "blake3": blake3, **hashers}


_hashers = _find_hashers()
_pack_length = struct.Struct("<Q").pack
_pack_float = struct.Struct("<d").pack


def _hasher_of(algorithm: str | None) -> Callable[[], Any]:
    if algorithm is not None and not (isinstance(algorithm, str) and algorithm in get_args(Algorithm)):
        raise ValueError(f'algorithm must be "blake3", "sha256" or "sha512", not {shown(algorithm)}')
    if algorithm not in _hashers:
        raise ImportError('algorithm "blake3" needs the package blake3: pip install blake3, or take "sha256"')
    return _hashers[algorithm]


def hash_item(value: object, algorithm: Algorithm | None = None, /, **kwargs: object) -> str:
    """Return the content hash of `value` and of the processor's keyword arguments, as hex digits.

    It accepts bool, int, float, complex, str, bytes, tensors, arrays, Pillow images of one frame, items, torch
    and numpy dtypes, paths, members of enumerations, and lists, tuples and dicts of these and of None; also as keyword
    arguments. A path is hashed by its text, not by its file.

    `algorithm` is "blake3", "sha256" or, with 128 digits instead of 64, "sha512". None takes BLAKE3 if its package is
    installed, else SHA-256. Name one where FIPS asks for it, or where processes compare hashes and not all of them have
    the package. It is given by position, because every keyword is an argument of the processor. ValueError for another
    name, and ImportError for "blake3" without its package.

    Raises TypeError, with the path, for any other value. That includes masked arrays, arrays of objects, of fields or
    of long doubles, and tensors that are sparse, nested, quantised or without data. Raises ValueError, with the path,
    for an image that cannot be read, and NestingError for a container that contains itself.

    An image of several frames (GIF, animated WebP or PNG, TIFF of several pages, MPO photograph) is a TypeError.
    Hash `image.copy()`, which is the current frame, or a list of copies. If the second frame cannot be found, or the
    file is closed, it is an image of one frame.

    These values have equal hashes by design:

    * bytes, a bytearray and a one-dimensional memoryview of bytes
    * a numpy scalar and its 0-d array, except that `np.str_` and `np.bytes_` equal str and bytes
    * a member of an enumeration of str or int, and its value
    * an instance of list, tuple, dict or array, and one of a subclass (a namedtuple)
    * a tensor on any device
    * images that differ only in file format, ICC profile or other metadata, which processors ignore

    The hash of an item covers its modality, keys, data, kinds of field and `dim`. It does not cover `slices` and
    `batch_size`, which depend on the batch.
    """
    if value is None:
        raise TypeError("value: expected an item, not None: every missing item would have the same hash")
    hasher = _hasher_of(algorithm)()
    for part, path in ((value, "value"), (kwargs, "kwargs")):
        try:
            _feed(hasher.update, part, path)
        except RecursionError:  # without its thousand frames
            raise NestingError(f"{path} is nested too deeply, or contains itself") from None
    return str(hasher.hexdigest())


def _feed_bytes(write: _Write, tag: bytes, body: bytes | memoryview) -> None:
    write(tag + _pack_length(len(body)))
    write(body)


def _feed_tensor(write: _Write, tensor: torch.Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"{path}: cannot hash a tensor that is sparse, nested, quantised or without data")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    _feed_bytes(write, b"T", f"{plain.dtype}{tuple(plain.shape)}".encode())
    _feed_bytes(write, b"d", plain.reshape(-1).view(torch.uint8).numpy().data)


def _describe_dtype(dtype: np.dtype[Any], path: str) -> str:
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or dtype.char in "gG":
        raise TypeError(
            f"{path}: cannot hash a dtype of objects, of fields, of arrays or of long doubles, such as {shown(dtype)} "
            "(hint: pass the fields as a dict of arrays, or array.astype(...) with another dtype)"
        )
    # Most dtypes of ml_dtypes have the same `dtype.str`, "<V1".
    return dtype.str if dtype.type.__module__ == "numpy" else f"{dtype.str}{[dtype.name]}"


def _feed_array(write: _Write, array: np.ndarray[Any, Any], path: str) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{path}: cannot hash a masked array (hint: pass its data and its mask, or array.filled())")
    _feed_bytes(write, b"A", f"{_describe_dtype(array.dtype, path)}{array.shape}".encode())
    _feed_bytes(write, b"d", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _feed_image(write: _Write, image: Any, path: str) -> None:
    if _answer(partial(_has_more_frames, image), False):
        raise TypeError(f"{path}: cannot hash an image of several frames (hint: pass image.copy() of one)")
    try:
        form, looks, pixels = _look_at(image)
    except MemoryError:
        raise
    except unless_interrupted(Exception) as error:  # decoders raise OSError, ValueError, SyntaxError and others
        raise ValueError(f"{path}: cannot hash an image that cannot be read: {cut(error)}") from error
    _feed_bytes(write, b"P", form)
    _feed_bytes(write, b"p", repr(looks).encode())
    _feed_bytes(write, b"d", pixels)


def _look_at(image: Any) -> tuple[bytes, tuple[object, ...], bytes]:
    # A processor sees the pixels, their meaning (mode, palette, transparent colour) and the orientation. Loading the
    # pixels may change all of these. Only an orientation that is a number turns the image, and not the text "6".
    image.load()
    orientation = _answer(lambda: image.getexif().get(0x0112, 1), 1)
    palette = image.getpalette(None)
    looks: tuple[object, ...] = (palette, image.info.get("transparency"))
    if palette is not None and (palette_mode := image.im.getpalettemode()) != "RGB":
        looks = (palette_mode, *looks)
    return f"{image.mode}{image.size}{orientation!r}".encode(), looks, image.tobytes()


def _has_more_frames(image: Any) -> bool:
    # To count the frames would read all of them, and of a TIFF in quadratic time. The first answer may rest on a
    # pointer alone. A seek that fails changes an image, down to its pixels, so another object on its file does it.
    if not getattr(image, "is_animated", False):
        return False
    if file := getattr(image, "_fp", None) or getattr(image, "fp", None):  # else the decoder has read all: it knows
        place = file.tell()  # fails if the file is closed, so that only the loaded frame is left
        try:
            file.seek(0)
            if twin := _answer(lambda: type(image)(file, image.filename), None):
                twin.seek(1)
        finally:
            file.seek(place)
    return True


def _answer(question: Callable[[], T], otherwise: T) -> T:
    """Ask a decoder about more than the pixels; what fails there must not decide about an image that can be read."""
    try:
        return question()
    except MemoryError:
        raise
    except unless_interrupted(Exception):
        return otherwise


def _feed_pairs(write: _Write, pairs: dict[Any, Any], path: str) -> None:
    encoded = []
    for key, value in pairs.items():
        if not isinstance(key, (str, bytes, int, float, tuple, type(None))):
            raise TypeError(f"{path}: cannot hash a key of {type(key).__name__}")
        name = bytearray()
        _feed(name.extend, key, cut(f"{path}[{shown(key)}]"))
        encoded.append((bytes(name), key, value))
    encoded.sort(key=lambda entry: entry[0])
    write(b"D" + _pack_length(len(encoded)))
    for stream, key, value in encoded:
        write(stream)
        _feed(write, value, cut(f"{path}[{shown(key)}]"))


def _feed_enum(write: _Write, member: enum.Enum, path: str) -> None:
    # In a spawned process, the main module has another name.
    cls = type(member)
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    write(b"E")
    for part in (module, cls.__qualname__, member.name):  # a combination of flags may have no name
        _feed(write, part, path)
    _feed(write, member.value, f"{path}.value")


def _feed(write: _Write, value: Any, path: str) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(write, value, path)
    elif isinstance(value, np.ndarray):
        _feed_array(write, value, path)
    elif isinstance(value, np.generic) and not isinstance(value, (str, bytes)):
        _feed_array(write, np.asarray(value), path)
    elif value is None:
        write(b"N")
    elif isinstance(value, bool):
        write(b"+" if value else b"-")
    elif isinstance(value, int):
        _feed_bytes(write, b"I", b"%d" % value)
    elif isinstance(value, float):
        _feed_bytes(write, b"F", _pack_float(value))
    elif isinstance(value, complex):
        _feed_bytes(write, b"C", _pack_float(value.real) + _pack_float(value.imag))
    elif isinstance(value, str):
        _feed_bytes(write, b"S", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)) or (
        isinstance(value, memoryview) and value.format == "B" and value.ndim == 1
    ):
        _feed_bytes(write, b"B", bytes(value))
    elif isinstance(value, (list, tuple)):
        write((b"L" if isinstance(value, list) else b"U") + _pack_length(len(value)))
        for index, part in enumerate(value):
            _feed(write, part, f"{path}[{index}]")
    elif isinstance(value, dict):
        _feed_pairs(write, value, path)
    elif isinstance(value, MultiModalKwargsItem):
        _feed_bytes(write, b"M", value.modality.encode())
        _feed_pairs(write, value.get_data(), path)
        fields = {key: f"{type(elem.field).__name__}{getattr(elem.field, 'dim', '')}" for key, elem in value.items()}
        _feed_pairs(write, fields, path)
    elif (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
        _feed_image(write, value, path)
    elif isinstance(value, torch.dtype):
        _feed_bytes(write, b"t", str(value).encode())
    elif isinstance(value, np.dtype):
        _feed_bytes(write, b"n", f"{_describe_dtype(value, path)}()".encode())
    elif isinstance(value, PurePath):
        kind = b"w" if isinstance(value, PureWindowsPath) else b"/"
        _feed_bytes(write, kind, str(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, enum.Enum):
        _feed_enum(write, value, path)
    else:
        raise TypeError(
            f"{path}: cannot hash {type(value).__name__} (hint: pass plain data that identifies it, such as "
            "sorted(value) of a set or dataclasses.asdict(value), or leave it out)"
        )
