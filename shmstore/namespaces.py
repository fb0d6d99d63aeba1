"""Scopes of keys: how the key of a scope is stored, read back and shown.

A plain key is stored as UTF-8. The key of a scope has a prefix: the byte 0xFF, the length of the scope in one byte, and
the scope in UTF-8. No UTF-8 text begins with 0xFF, so no plain key looks like one of a scope.
"""

from shmstore.errors import shown

__all__ = ["MARK", "named", "prefix_of", "split"]

MARK = b"\xff"
_MAX_SCOPE = 255


def prefix_of(scope: str) -> bytes:
    """Return what the stored keys of `scope` begin with; TypeError or ValueError if there can be no such scope."""
    if not isinstance(scope, str):
        raise TypeError(f"scope must be a str, not {type(scope).__name__}")
    try:
        packed = scope.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"scope must be encodable in UTF-8: {error.reason} (position {error.start})") from None
    if not 0 < len(packed) <= _MAX_SCOPE:
        raise ValueError(
            f"scope must have 1 to {_MAX_SCOPE} bytes in UTF-8, not {len(packed)}; for no scope pass None, and for a "
            "long name pass its hash"
        )
    return MARK + bytes((len(packed),)) + packed


def split(stored: bytes, errors: str = "strict") -> tuple[str | None, str]:
    """Return the scope, or None, and the key; UnicodeDecodeError if `errors` is strict and they are not UTF-8.

    Bytes with an incomplete prefix have no scope.
    """
    if stored[:1] == MARK and 0 < int.from_bytes(stored[1:2], "little") < len(stored) - 2:
        end = 2 + stored[1]
        return stored[2:end].decode(errors=errors), stored[end:].decode(errors=errors)
    return None, stored.decode(errors=errors)


def named(key: str | None, scope: str | None) -> str:
    """Return a key for use in a message, with its scope."""
    return shown(key) if scope is None else f"{shown(key)} of scope {shown(scope)}"
