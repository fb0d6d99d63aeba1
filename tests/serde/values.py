"""What the tests of the serializers share: a stand-in for the store, exact comparison, and awkward leaves."""

import ctypes
import struct
from typing import Any

import numpy as np
import torch

from shmstore.serde import ALIGNMENT, MsgpackSerde

SERDE = MsgpackSerde()


def aligned(nbytes: int, filler: int = 0xA5) -> Any:
    """Return a buffer object of `nbytes` at an aligned address; it ends when nothing refers to it."""
    region = (ctypes.c_ubyte * (nbytes + ALIGNMENT))()
    ctypes.memset(region, filler, nbytes + ALIGNMENT)
    start = -ctypes.addressof(region) % ALIGNMENT
    return (ctypes.c_ubyte * nbytes).from_buffer(region, start)


def store(encoded: Any, serde: Any = SERDE) -> Any:
    """Do what the store does with an encoded value; return the payload."""
    payload = aligned(encoded.nbytes)
    start = ctypes.addressof(payload)
    for offset, nbytes, address in encoded.spans:
        ctypes.memmove(start + offset, address, nbytes)
    for offset, nbytes, source in encoded.fills:
        serde.fill((ctypes.c_ubyte * nbytes).from_address(start + offset), source)
    return payload


def round_trip(value: Any, *, copy: bool = False) -> Any:
    encoded = SERDE.encode(value)
    return SERDE.decode(encoded.meta, store(encoded), copy=copy)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return bytes(resolved.view(carrier).reshape(-1).numpy().tobytes())


def exact(value: Any) -> Any:
    """Describe `value` so that two descriptions are equal just where types, order, dtypes, shapes and bits are."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dtype, tuple(value.shape), tensor_bytes(value))
    if kind is np.ndarray:
        # numpy's own copy of a structured array leaves the padding undefined
        raw = value if value.dtype.names is None else value.view(np.dtype((np.void, value.itemsize)))
        return (kind, value.dtype, value.shape, raw.tobytes())
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if kind is float:
        return (kind, struct.pack("<d", value))
    if kind is dict:
        return (kind, [(exact(key), exact(item)) for key, item in value.items()])
    if kind in (list, tuple):
        return (kind, [exact(item) for item in value])
    return (kind, value)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaN payloads and all; bools are 0 or 1."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    if not count:
        return torch.empty(shape, dtype=dtype)
    carrier = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[dtype.itemsize]
    return torch.from_numpy(raw.view(carrier).reshape(shape)).view(dtype)


def random_array(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """An array of random bytes; bools are 0 or 1, text is ASCII."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype.names is not None:  # padding and text are as good as any: bytes that are valid everywhere
        raw = np.ones(count, np.uint8)
    if dtype.kind == "b":
        raw &= 1
    if dtype.kind == "U":
        raw = (np.random.default_rng(seed).integers(65, 90, count // 4)).astype(dtype.str[0] + "u4").view(np.uint8)
    return np.ndarray(shape, dtype, bytearray(raw.tobytes()))
