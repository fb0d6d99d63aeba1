"""What a store is created with: each option once, with its unit, its default, some advice and its check."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Required, TypedDict, TypeVar, get_type_hints

from shmstore.bindings import store as native
from shmstore.bindings.inspect import FLAGS
from shmstore.errors import check_flags, shown
from shmstore.places import Folder
from shmstore.store.arguments import checked_access, int_of, several_of

MAX_CAPACITY, MAX_OBJECTS = native.MAX_CAPACITY, native.MAX_OBJECTS
MAX_READERS, MAX_GROUPS, MAX_WRITERS = native.MAX_READERS, native.MAX_GROUPS, native.MAX_WRITERS
_BYTES = "an int of bytes, such as 4 << 30 for 4 GiB"
_Call = TypeVar("_Call", bound=Callable[..., Any])


class Access(TypedDict, total=False):
    """Where the file of a store is, and which users may open it."""

    dir: Folder | None
    """The folder that the store is a file of; by default that of SHMSTORE_DIR, without it /dev/shm.

    It should be a tmpfs."""
    mode: int
    """The permissions of the file; by default 0o600, which is for this user alone.

    0o660 lets a group use the store, 0o666 every user: whoever may read it must also write it. All who attach to, join
    or recover such a store, also its owner, pass the owner as `allow_uid`."""
    gid: int | None
    """The group of `mode` 0o660; by default the one that files of the folder get."""


class StoreOptions(Access, total=False):
    """What a store is created with: the keywords that `create` and `open` have in common.

    If in doubt, choose `capacity` and `n_readers`, and leave out the rest. A function that passes them on takes
    `**options: Unpack[StoreOptions]`.
    """

    capacity: Required[int]
    """Bytes for the objects of each writer, rounded up to 64; reserved before the call returns.

    If in doubt, start with 4 GiB, as the caches of engines do: `shmstore dump` says what a larger store would have hit.
    It must be more than all readers hold at a time, or puts raise StoreFullError."""
    n_readers: Required[int]
    """The number of ranks, 0 to `n_readers` - 1, that each reference waits for.

    If in doubt, use the number of processes that read every reference, such as the workers of an engine. A rank that
    never attaches keeps what waits for it, until `retire`."""
    groups: Sequence[int] | None
    """The number of ranks of each group; by default all ranks are one group.

    [4, 4] is for two replicas of an engine: ranks 0 to 3 are group 0. A reference can wait for one group only."""
    n_writers: int
    """The number of processes that may put at a time; by default 1.

    Each has an arena of its own, with this capacity and number of objects, which is reserved when it is first taken:
    a number that is too large costs only tables. All find the objects of all by key, so each is stored once."""
    max_object_size: int | None
    """Bytes that an object (key, metadata and tensors) takes at most; by default the capacity."""
    max_objects: int | None
    """The number of objects of each writer; by default one per 16 KiB of capacity, from 256 to 1,048,576."""
    prefault: bool
    """Whether to map every page now; by default the first put into each page is many times slower."""
    huge_pages: bool
    """Whether to ask for 2 MiB pages, as far as there are any; by default not."""
    checksums: bool
    """Whether to compute a CRC-32C of each object at its commit, for `shmstore verify`; by default not."""


def mode_for(gid: int | None) -> int:
    """Return the `mode` of a store that is this user's alone, or with a `gid` also that group's."""
    return 0o600 if gid is None else 0o660


def store_options(
    *,
    capacity: Any,
    n_readers: Any,
    groups: Any = None,
    n_writers: Any = 1,
    max_object_size: Any = None,
    max_objects: Any = None,
    prefault: Any = False,
    huge_pages: Any = False,
    checksums: Any = False,
    dir: Any = None,
    mode: Any = 0o600,
    gid: Any = None,
) -> tuple[native.Options, Folder | None, tuple[int, int | None]]:
    """Return `StoreOptions`, checked and rounded; the folder, which is not checked; and permissions and group."""
    capacity = int_of("capacity", capacity, 1, MAX_CAPACITY, _BYTES)
    n_readers = int_of("n_readers", n_readers, 1, MAX_READERS)
    size = 0 if max_object_size is None else int_of("max_object_size", max_object_size, 1, capacity, _BYTES)
    objects = 0 if max_objects is None else int_of("max_objects", max_objects, 1, MAX_OBJECTS)
    flags = {"prefault": prefault, "huge_pages": huge_pages, "checksums": checksums}
    check_flags(**flags)
    bits = sum(FLAGS[name] for name, on in flags.items() if on)
    ranks = _checked_groups(groups, n_readers)
    writers = int_of("n_writers", n_writers, 1, MAX_WRITERS)
    access = checked_access(mode, gid)
    try:
        return native.Options(capacity, size, n_readers, objects, bits, ranks, writers).rounded(), dir, access
    except ValueError:
        raise ValueError(
            f"{writers} writers with {capacity} bytes and {objects or 'as many'} objects each are more than a "
            f"reference can address: together {MAX_CAPACITY} bytes and {MAX_OBJECTS} objects"
        ) from None


store_options.__qualname__ = "ObjectStoreWriter.create or open"  # in Python's own errors about its arguments


def _checked_groups(groups: Any, n_readers: int) -> tuple[int, ...]:
    if groups is None:
        return ()
    sizes = tuple(
        int_of(f"groups[{i}]", size, 1, n_readers) for i, size in enumerate(several_of("groups", groups, "ints"))
    )
    if sum(sizes) != n_readers or len(sizes) > MAX_GROUPS:
        raise ValueError(
            f"groups must have all {n_readers} ranks between them, in up to {MAX_GROUPS} groups; "
            f"{shown(list(sizes))} is {len(sizes)} groups of {sum(sizes)} ranks together"
        )
    return sizes


def shows_options(call: _Call) -> _Call:
    """Let `help` and `inspect.signature` show each option of a call that takes `**options`, with its default."""
    types, own = get_type_hints(StoreOptions), signature(call)
    options = [one.replace(annotation=types[name]) for name, one in signature(store_options).parameters.items()]
    first, name, *more = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    call.__signature__ = own.replace(parameters=[first, name, *options, *more])  # type: ignore[attr-defined]
    return call
