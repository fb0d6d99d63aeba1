"""What every C handle needs in Python: an owner, and errors."""

import operator
import os
from functools import partial
from typing import Any, Literal, NoReturn

from shmstore import errors
from shmstore.bindings._shmstore import ffi, lib

# A destructor in C that does nothing; a partial of it keeps its argument alive until it runs.
keep = operator.is_

_ERRORS: dict[int, type[Exception]] = {
    lib.SHMS_ETOOLARGE: errors.ObjectTooLargeError,
    lib.SHMS_EEXISTS: errors.ObjectExistsError,
    lib.SHMS_ENOTFOUND: errors.ObjectNotFoundError,
    lib.SHMS_ESTALE: errors.StaleRefError,
    lib.SHMS_ENOSTORE: errors.StoreNotFoundError,
    lib.SHMS_ESTOREEXISTS: errors.StoreExistsError,
    lib.SHMS_EWRITERACTIVE: errors.WriterActiveError,
    lib.SHMS_ERANKINUSE: errors.RankInUseError,
    lib.SHMS_ELAYOUT: errors.LayoutMismatchError,
    lib.SHMS_ECLOSED: errors.StoreClosedError,
    lib.SHMS_EFOREIGN: errors.ForeignStoreError,
    lib.SHMS_ESPARSE: errors.SparseStoreError,
    lib.SHMS_EBUSY: errors.ObjectBusyError,
}

_FULL: dict[int, Literal["bytes", "slots", "leases", "quota"]] = {
    lib.SHMS_EFULL: "bytes",
    lib.SHMS_ENOSLOT: "slots",
    lib.SHMS_ENOLEASE: "leases",
    lib.SHMS_EQUOTA: "quota",
}


def fail(code: int) -> NoReturn:
    """Raise the error of a negative C code; for SHMS_ESYS the OSError of errno."""
    raise _with_code(_error(code), code)  # a local variable would make a cycle through the traceback


def _with_code(error: Exception, code: int) -> Exception:
    if isinstance(error, errors.ShmStoreError):
        error._code = code
    return error


def _error(code: int) -> Exception:
    if code == lib.SHMS_ESYS:
        return OSError(ffi.errno, os.strerror(ffi.errno))
    if code == lib.SHMS_EFORKED:
        return errors.StoreClosedError(
            "this object was inherited through fork and belongs to the parent process",
            hint="attach in the child, after the fork",
        )
    if code == lib.SHMS_EOTHERSTORE:
        return errors.StoreNotFoundError(
            "its name is now another store's", hint="this handle's store is gone; attach with the new writer's handle"
        )
    if code == lib.SHMS_ERANKS:
        return errors.LayoutMismatchError(
            "it does not have as many ranks as its handle says", hint="use the handle that its writer made"
        )
    if code == lib.SHMS_ECORRUPT:
        return errors.CorruptStoreError(
            "the store's tables contradict each other",
            hint="`shmstore verify NAME` names contradictions; remove the store with `shmstore gc --yes --force NAME`",
        )
    if code == lib.SHMS_EOPTIONS:
        return errors.LayoutMismatchError("it was created with other options", hint="open it with those options")
    if code == lib.SHMS_ECREATING:
        return errors.StoreNotFoundError(
            "its creation is not over", hint="attach when the writer has sent its handle, or try again"
        )
    if code in _FULL:
        return errors.StoreFullError(resource=_FULL[code])
    if code == lib.SHMS_EINVAL:
        return ValueError("an argument is out of range")
    if code == lib.SHMS_ENOMEM:
        return MemoryError("this process has no memory left")
    return _ERRORS.get(code, errors.ShmStoreError)()


def require(code: int) -> int:
    """Return the code, or raise its error if it is negative."""
    if code < 0:
        fail(code)
    return code


def keeps_alive(pointer: Any, owner: Any) -> Any:
    """Return the same pointer; it keeps `owner` alive."""
    return ffi.gc(pointer, partial(keep, owner))


def owned(box: Any) -> Any:
    """Return the handle in `box`; it keeps the box alive, whose destructor frees the handle."""
    return keeps_alive(box[0], box)


def words_of(record: Any) -> dict[str, Any]:
    """Return the fields of a C record, and those of its counters beside them."""
    kind = ffi.typeof(record)
    found = {name: getattr(record, name) for name, _ in (kind.item if kind.kind == "pointer" else kind).fields}
    return words_of(found.pop("counters")) | found if "counters" in found else found
