"""Namespaces of keys: how the key of a namespace is stored, read back and shown.

A plain key is stored as UTF-8. The key of a namespace has a prefix: the byte 0xFF, the length of the namespace in one
byte, and the namespace in UTF-8. No UTF-8 text begins with 0xFF, so no plain key looks like one of a namespace.
"""

from typing import Any

from shmstore.errors import shown

MARK = b"\xff"
_MAX_NAMESPACE = 255
_SHOWN = "backslashreplace"


def packed_text(name: str, text: Any) -> bytes:
    """Return `text` in UTF-8; TypeError or ValueError, which have the `name`, if it is not a str or has no UTF-8."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, not {type(text).__name__}") from None
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be encodable in UTF-8: {error.reason} (position {error.start})") from None


def prefix_of(namespace: str) -> bytes:
    """Return what the stored keys of `namespace` begin with; TypeError or ValueError if there is no such one."""
    packed = packed_text("namespace", namespace)
    if not 0 < len(packed) <= _MAX_NAMESPACE:
        raise ValueError(
            f"namespace must have 1 to {_MAX_NAMESPACE} bytes in UTF-8, not {len(packed)}; pass None for none, and "
            "the hash of a longer name"
        )
    return MARK + bytes((len(packed),)) + packed


def split(stored: bytes) -> tuple[str | None, str]:
    """Return the namespace, or None, and the key; bytes that are not UTF-8 are shown as ``\\xff``.

    No call of ours stores such bytes, nor those of an incomplete prefix, which have no namespace. But a process that
    does must not keep the others of its store from listing what is in it.
    """
    if stored[:1] == MARK and 0 < int.from_bytes(stored[1:2], "little") < len(stored) - 2:
        end = 2 + stored[1]
        return stored[2:end].decode(errors=_SHOWN), stored[end:].decode(errors=_SHOWN)
    return None, stored.decode(errors=_SHOWN)


def named(key: str | None, namespace: str | None) -> str:
    """Return a key for use in a message, with its namespace."""
    return shown(key) if namespace is None else f"{shown(key)} of namespace {shown(namespace)}"
