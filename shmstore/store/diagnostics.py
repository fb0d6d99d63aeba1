"""Turn error codes of C into errors that tell the caller what was wrong; nothing here runs before a failure."""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import Any, Final, Literal

from shmstore.bindings import store as native
from shmstore.bindings.inspect import FLAGS, Inspector, probe
from shmstore.errors import (
    CorruptStoreError,
    ForeignStoreError,
    LayoutMismatchError,
    RankInUseError,
    SharedMemoryError,
    ShmStoreError,
    StaleRefError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
    cut,
    listed,
    shown,
)
from shmstore.files import NO_STORE_HINT, SegmentFile, another_user, classify, holders, of_other_namespaces
from shmstore.places import VARIABLE, file_system, parts_of, path_of, stat_of
from shmstore.refs import ObjectRef
from shmstore.store.arguments import MODES


def stale(error: StaleRefError, ref: ObjectRef, store_id: int, n_writers: int = 1) -> StaleRefError:
    """Return the same error with the reference, and a hint if it belongs to another store or writer."""
    hint = None
    if ref.store_id != store_id:
        hint = f"it belongs to store {ref.store_id:08x}, and this is {store_id:08x}: use references of this store only"
    elif n_writers > 1:
        hint = "only the writer that handed a reference out can end or hold its lease, or assign its group"
    return StaleRefError(f"{error.message}: {ref!r}", hint=hint)


def stale_or_gone(error: StaleRefError, ref: ObjectRef, reader: native.Reader, place: str) -> ShmStoreError:
    """Return the error for a reader's stale reference, which may be so because its store was removed."""
    if reader.named():
        return stale(error, ref, reader.store_id)
    gone = f"store {shown(place)} was removed"
    hint = "close this reader, and attach again with the new writer's handle, or by attach(name, wait=seconds)"
    if os.path.lexists(path_of(place)):
        return StoreClosedError(f"{gone} and created again, and this reader still maps the removed one", hint=hint)
    return StoreNotFoundError(f"{gone}, and {ref!r} is not in what this reader still maps", hint=hint)


def not_opened(
    error: Exception,
    expected: tuple[str, int, int, int],
    what: Literal["arena", "rank"],
    number: int | None,
    required: native.Options | None = None,
    waited: float | None = None,
) -> Exception:
    """Return the error of C for a store, or an arena or rank of it, that could not be opened, with what was wrong.

    `expected`, as of `expected_store`, and the options `required` are what the caller has asked for.
    """
    place, _, ranks, allow_uid = expected
    match error:
        case StoreNotFoundError():
            return not_found(error, place, waited)
        case WriterActiveError():
            return active(place, number, required, allow_uid)
        case RankInUseError():
            return in_use(place, number)
        case LayoutMismatchError(_code=native.OTHER_OPTIONS) if required is not None:
            with closing(Inspector(place, allow_uid)) as inspector:
                differ = differences(inspector.facts(), required)
            return _mismatch(place, differ, "open it with these, or let on_mismatch='recreate' replace it")
        case LayoutMismatchError() if error._code != native.OTHER_RANKS:
            return cannot_open(classify(place))
        case ForeignStoreError():
            return foreign(place, allow_uid=allow_uid)
        case CorruptStoreError():
            return _named(error, place)
        case OSError():
            return unusable(error, place)
    option, has = "n_writers" if what == "arena" else "n_readers", "an unknown number of"
    with suppress(ShmStoreError, OSError):  # it has gone meanwhile
        has = str(probe(place)[option])
    if isinstance(error, LayoutMismatchError) or (what == "rank" and (number or 0) < ranks):
        hint = "pass the writer's handle, and the same n_readers everywhere (world_size * data_parallel_size)"
        return LayoutMismatchError(f"store {shown(place)} has {has} ranks, not {ranks}", hint=hint)
    return ValueError(f"store {shown(place)} has no {what} {number}: {option} is {has}")


def _named(error: ShmStoreError, place: str, after: str = "") -> ShmStoreError:
    """Return the same error with the store's name."""
    named = type(error)(f"store {shown(place)}: {error.message}{after}", hint=error.hint)
    named._code = error._code  # `open` asks whether it is being created
    return named


def _mismatch(place: str, differ: list[str], hint: str) -> LayoutMismatchError:
    return LayoutMismatchError(f"store {shown(place)} was created with other options: {', '.join(differ)}", hint=hint)


def differences(facts: dict[str, Any], asked: native.Options) -> list[str]:
    """Return in words which options of a store differ from those asked for."""
    differ = [
        f"{option} is {facts[option]}, not {wanted}"
        for option, wanted in asked._asdict().items()
        if option != "flags" and facts[option] != wanted
    ]
    for flag, bit in FLAGS.items():
        if (facts["flags"] ^ asked.flags) & bit and flag != "prefault":
            differ.append(f"{flag} is {bool(facts['flags'] & bit)}")
    return differ


# ---- who has it


def who_holds(place: str | None, pids: Iterable[int]) -> str:
    """Return these processes in words, or "" if none is known; those of a store may be of another PID namespace."""
    known = list(dict.fromkeys(filter(None, pids)))
    elsewhere = of_other_namespaces(place, known) if place else []
    said = [f"{pid} (of another PID namespace)" if pid in elsewhere else _with_title(pid) for pid in known]
    return f"process{'es' if len(said) > 1 else ''} {listed(said)}" if said else ""


def _with_title(pid: int) -> str:
    """Return a process with its title, and whether its parent has ended, as a server's worker may outlive that."""

    def look(pid: int | str) -> list[str]:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            title, _, rest = file.read().partition("(")[2].rpartition(") ")
        return [shown(title)[1:-1], *rest.split()[1:4]]

    said = str(pid)
    with suppress(OSError):  # it has ended meanwhile, or its parent is of another PID namespace
        title, parent, _, session = look(pid)
        said = f"{pid} ({title})"
        if session not in (str(pid), look(parent)[3]):  # only a process that others have adopted
            said = f"{pid} ({title}, whose parent has ended)"
    return said


def active(
    place: str,
    arena: int | None = None,
    asked: native.Options | None = None,
    allow_uid: int = native.OWN_UID,
    hint: str | None = None,
) -> WriterActiveError | LayoutMismatchError:
    """Return the error for a store whose writers are alive, or the one of that arena; it names their processes.

    If other options were `asked` for, waiting does not help with a store of several writers: it says which differ.
    """
    store, known, pids = f"store {shown(place)}", "", list[int]()
    with suppress(ShmStoreError, OSError), closing(Inspector(place, allow_uid)) as inspector:  # or of another version
        first = inspector.facts()
        n_writers = first["n_writers"]
        if asked and max(n_writers, asked.n_writers) > 1 and (differ := differences(first, asked)):
            return _mismatch(place, differ, "give all writers the same options; none replaces it while another lives")
        one = n_writers > 1 and arena not in (None, native.ANY_ARENA)
        if one:
            store, hint = f"arena {arena} of {store}", "omit the index to take the first free arena, or wait for this"
        seen = [inspector.facts(each) for each in ([arena or 0] if one else range(n_writers))]
        pids = [facts["writer_pid"] for facts in seen if facts["writer_alive"]] + [first["owner_pid"]] * (not one)
        known = f" (n_writers={n_writers})"
    who = who_holds(place, pids) or f"one that is still ending, which `fuser {path_of(place)}` names"
    whose = "writers" if who.startswith("processes") else "a writer"
    return WriterActiveError(f"{store} already has {whose}: {who}{known}", hint=hint)


def creating(place: str, waited: float | None = None) -> WriterActiveError:
    """Return the error for a store whose creation is not over; a dead creator's young empty file looks so, too."""
    who = ""
    with suppress(ShmStoreError, OSError):  # it has gone meanwhile
        file = classify(place)
        who = who_holds(None, holders(file.device, file.inode))
    what = f"store {shown(place)} is still being created by {who or 'another process'}{after(waited)}"
    return WriterActiveError(
        what, hint="let that process continue, or end it; try again, or wait longer (wait=seconds)"
    )


def in_use(place: str, rank: int | None, ranks: int = 0) -> RankInUseError:
    """Return the error for a rank that is taken, or for all `ranks`; it names the processes that have them."""
    pids = [native.rank_pid(place, number) for number in (range(ranks) if rank is None else [rank])]
    store, who = f"store {shown(place)}", who_holds(place, pids) or "live readers"
    if rank is not None:
        return RankInUseError(f"rank {rank} of {store} is taken by {who}")
    hint = "close a reader, end a process that should not be there, or create the store for more"
    return RankInUseError(f"all {ranks} ranks of {store} are taken by {who}", hint=hint)


# ---- what is there


def after(waited: float | None) -> str:
    """Return how long a call has waited, to be added to a message; "" if it has not."""
    return f", after {waited:g} second{'s' * (waited != 1)}" if waited else ""


def not_found(error: StoreNotFoundError, place: str, waited: float | None = None) -> ShmStoreError:
    """Return the same error with the store's name and how long it was waited for."""
    folder = parts_of(place)[0]
    return _named(error, place, after(waited)) if os.path.isdir(folder) else _no_folder(folder)


def _no_folder(folder: str) -> SharedMemoryError:
    hint = f"mount it, or pass the folder at which this process has it: dir=, or {VARIABLE}"
    return SharedMemoryError(f"there is no folder {cut(folder)}", number=errno.ENOENT, hint=hint)


def unusable(error: OSError, place: str) -> ShmStoreError:
    """Return the error for a system call that failed; an error of shmstore comes back unchanged."""
    if isinstance(error, ShmStoreError):
        return error
    folder, hint = parts_of(place)[0], None
    what = f"{cut(path_of(place))} cannot be used: {error.strerror}"
    if error.errno == errno.EPERM:
        hint = "a process gives a store only to a group of its own: see gid, and id -G"
    elif error.errno == errno.ENOENT and not os.path.isdir(folder):
        return _no_folder(folder)
    elif error.errno in (errno.EOPNOTSUPP, errno.ENODEV, errno.ENOLCK):  # fallocate, mmap, or a lock of a mapping
        what += f"; {cut(folder)} is on {file_system(folder) or 'a file system'}, which lacks what a store needs"
        hint = f"use a folder of a tmpfs: dir=, or {VARIABLE}"
    return SharedMemoryError(what, number=error.errno, hint=hint)


def exists(place: str) -> StoreExistsError:
    """Return the error for a name that is taken."""
    hint = None
    with suppress(OSError):  # it has gone meanwhile
        if (uid := stat_of(place).st_uid) != os.geteuid():
            hint = f"choose another name, or omit it: this one belongs to user {uid}"
    return StoreExistsError(f"{path_of(place)} exists already", hint=hint)


def foreign(place: str, may_allow: bool = True, allow_uid: int = native.OWN_UID) -> ForeignStoreError:
    """Return the error for a store that belongs to another user, or that other users may open.

    `may_allow` says whether the call has the option `allow_uid`, and that is what it was.
    """
    error, path, me = another_user(place), path_of(place), os.geteuid()
    with suppress(OSError):  # it has gone meanwhile
        seen = stat_of(place)
        mode, uid = stat.S_IMODE(seen.st_mode), seen.st_uid
        what = f"store {shown(place)} has mode {mode:04o}"
        if (
            may_allow
            and uid == (me if allow_uid == native.OWN_UID else allow_uid)
            and 0o600 | mode & 0o066 not in MODES
        ):
            hint = f"chmod 600 {path}, or 660 if its group shares it"
            return ForeignStoreError(f"{what}: whoever may only read it could lock ranks and arenas", hint=hint)
        if uid == me and not mode & 0o077:
            hint = "omit allow_uid, or pass the name of that user's store"
            return ForeignStoreError(f"{what} and belongs to this user, {uid}; allow_uid names another", hint=hint)
        if uid == me:
            hint = f"chmod 600 {path} if nobody else needs it"
            error = ForeignStoreError(f"{what}: others than its owner may open it", hint=hint)
        if may_allow and os.access(path, os.R_OK | os.W_OK, effective_ids=True):  # else it cannot help
            error.hint += f", or pass allow_uid={uid}, or --allow-uid {uid} to a command, if you trust all its writers"
        elif mode & 0o060 == 0o060:
            error.hint += f", or as a member of group {seen.st_gid} (of a pod: supplementalGroups)"
    return error


def cannot_open(file: SegmentFile) -> ShmStoreError:
    """Return the error for a file that does not have the layout of a store of this version, or cannot be read."""
    if file.state == "unreadable":
        return another_user(file.place)
    what: str = file.state if file.state != "ok" else "a store on a disk, made before this host was started"
    error = LayoutMismatchError(f"{path_of(file.place)}: {file.problem or what}")
    if file.place.startswith("/proc/"):
        error.hint = (
            "this descriptor is not a store's, or it is another process's: shmstore ls --pid PID lists those of a "
            "process, and a call takes fd=, which handle.send has sent"
        )
    elif file.state in ("foreign", "blank"):
        error.hint = NO_STORE_HINT
    elif file.state == "being created":
        error.hint = "wait for its writer to finish"
    elif file.state != "other version":
        error.hint = "it cannot be opened; shmstore gc --yes --force NAME removes it"
    return error


# ---- what has run out

_RUN_OUT: Final = {
    "leases": "all {max_leases} lease entries are taken by unread references and unfinished puts",
    "slots": "all {max_objects} slots are taken by objects that are held",
    "quota": "{needed}, and kind {kind} has {kind_bytes} of its quota of {quota} bytes, too much of it held",
    "bytes": "{needed} in one piece, {free} of {capacity} free, {reclaimable} reclaimable, at most {longest} of both "
    "in one piece",
}


def full(
    writer: native.Writer,
    refusal: dict[str, Any],
    resource: Literal["bytes", "slots", "leases", "quota"] | None,
    nbytes: int | None = None,
    extra: int = 0,
    kind: str | None = None,
    waited: float = 0.0,
) -> StoreFullError:
    """Return the error for a store that has run out of `resource`; it says who holds how much, and what is left.

    `extra` is the size of key and metadata, which precede the payload's `nbytes`. `waited` is in seconds.
    """
    held, writers = refusal["held"], refusal["held_by_writer"]
    span = sum(-(-size // native.ALIGN) * native.ALIGN for size in (extra, nbytes or 0))
    needed, free = f"{nbytes} bytes ({span} with key and metadata) needed", refusal["capacity"] - refusal["used_bytes"]
    what = _RUN_OUT[resource or "bytes"].format_map(refusal | {"needed": needed, "kind": shown(kind), "free": free})
    if refusal["kept"]:
        what += f"; {refusal['kept']} bytes protected, held by the writer or in unfinished puts"
    by = [f"rank {rank}: {size} bytes" for rank, size in sorted(held.items())]
    if by := by + [f"writer {number}: {size} bytes" for number, size in sorted(writers.items())]:
        what += f"; held by {listed(by)}"
    full = StoreFullError(
        f"{StoreFullError.default_message}{after(waited)}: {what}",
        needed=nbytes,
        held_bytes_by_rank=held,
        held_bytes_by_writer=writers,
        resource=resource,
    )
    if resource == "bytes" and free + refusal["reclaimable"] >= span:
        full.hint = f"held objects split the space: {full.hint}"
    if refusal["kept"]:
        full.hint = f"end the leases of hold, leave protect(), commit or abort what begin() has begun; or {full.hint}"
    if absent := [rank for rank in refusal["awaited"] if rank in held]:
        full.hint = (
            f"these ranks have never attached: {listed(absent)}; start them, or call retire(rank) in each writer "
            f"that hands out references; or {full.hint}"
        )
    if len(writer.groups) > 1:
        full.hint += "; a lease that assign_group(ref, group) has given to no group waits for all of them"
    return full
