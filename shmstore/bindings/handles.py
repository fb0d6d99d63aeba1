"""What every C handle needs in Python: an owner, and errors."""

import operator
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from shmstore import errors
from shmstore.bindings._shmstore import ffi, lib

# A destructor in C that does nothing; a partial of it keeps its argument alive until it runs.
keep = operator.is_

_ERRORS: dict[int, Callable[[], Exception]] = {
    lib.SHMS_ESYS: lambda: OSError(ffi.errno, os.strerror(ffi.errno)),
    lib.SHMS_EINVAL: partial(ValueError, "an argument is out of range"),
    lib.SHMS_ENOMEM: partial(MemoryError, "this process has no memory left"),
    lib.SHMS_EFULL: partial(errors.StoreFullError, resource="bytes"),
    lib.SHMS_ENOSLOT: partial(errors.StoreFullError, resource="slots"),
    lib.SHMS_ENOLEASE: partial(errors.StoreFullError, resource="leases"),
    lib.SHMS_EQUOTA: partial(errors.StoreFullError, resource="quota"),
    lib.SHMS_ETOOLARGE: errors.ObjectTooLargeError,
    lib.SHMS_EEXISTS: errors.ObjectExistsError,
    lib.SHMS_ENOTFOUND: errors.ObjectNotFoundError,
    lib.SHMS_ESTALE: errors.StaleRefError,
    lib.SHMS_ENOSTORE: errors.StoreNotFoundError,
    lib.SHMS_ESTOREEXISTS: errors.StoreExistsError,
    lib.SHMS_EWRITERACTIVE: errors.WriterActiveError,
    lib.SHMS_ERANKINUSE: errors.RankInUseError,
    lib.SHMS_ELAYOUT: errors.LayoutMismatchError,
    lib.SHMS_EOPTIONS: errors.LayoutMismatchError,  # store.diagnostics says which
    lib.SHMS_ECLOSED: errors.StoreClosedError,
    lib.SHMS_EFOREIGN: errors.ForeignStoreError,
    lib.SHMS_ESPARSE: errors.SparseStoreError,
    lib.SHMS_EBUSY: errors.ObjectBusyError,
    lib.SHMS_ENOARENA: errors.NoArenaError,
    lib.SHMS_EMAP: lambda: errors.SharedMemoryError(
        f"the object cannot be mapped for this reader alone: {os.strerror(ffi.errno)}",
        number=ffi.errno,
        hint="drop private values that are not needed, or read it with copy=True; the limits of mappings are ulimit -v "
        "(RLIMIT_AS) and sysctl vm.max_map_count; closing descriptors that are the store's ends private reads",
    ),
    lib.SHMS_ERANKS: errors.LayoutMismatchError,  # store.diagnostics says how many
    lib.SHMS_EFORKED: partial(
        errors.StoreClosedError,
        "this object was inherited through fork and belongs to the parent process",
        hint="attach in the child, after the fork",
    ),
    lib.SHMS_EOTHERSTORE: partial(
        errors.StoreNotFoundError,
        "it is now another store",
        hint="this handle's store was removed; attach with the new writer's handle",
    ),
    lib.SHMS_ECORRUPT: partial(
        errors.CorruptStoreError,
        "the store's tables contradict each other",
        hint="`shmstore verify NAME` names contradictions; remove the store with `shmstore gc --yes --force NAME`",
    ),
    lib.SHMS_ECREATING: partial(
        errors.StoreNotFoundError,
        "its creation is not over",
        hint="attach when the writer has sent its handle, or try again",
    ),
}


def fail(code: int) -> NoReturn:
    """Raise the error of a negative C code; for SHMS_ESYS the OSError of errno."""
    raise _with_code(_ERRORS.get(code, errors.ShmStoreError)(), code)  # a local variable would be in a cycle


def _with_code(error: Exception, code: int) -> Exception:
    if isinstance(error, errors.ShmStoreError):
        error._code = code
    return error


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
    """Return the fields of a C record, and those of its counters next to them."""
    kind = ffi.typeof(record)
    found = {name: getattr(record, name) for name, _ in (kind.item if kind.kind == "pointer" else kind).fields}
    return words_of(found.pop("counters")) | found if "counters" in found else found
