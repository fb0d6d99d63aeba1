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
    SparseStoreError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
    cut,
    listed,
    shown,
)
from shmstore.files import SegmentFile, another_user, classify, holders, of_other_namespaces
from shmstore.places import VARIABLE, file_system, parts_of, path_of, stat_of
from shmstore.refs import ObjectRef
from shmstore.store.arguments import MODES


def stale(error: StaleRefError, ref: ObjectRef, store_id: int, n_writers: int = 1) -> StaleRefError:
    """Return the same error with the reference, and a hint if it belongs to another store or writer."""
    hint = None
    if ref.store_id != store_id:
        hint = (
            f"it belongs to store {ref.store_id:08x}, and this store is {store_id:08x}; a store that was created again "
            "under the same name does not accept earlier references"
        )
    elif n_writers > 1:
        hint = (
            "the writer that handed a reference out ends or holds its lease and assigns its group; no other writer can"
        )
    return StaleRefError(f"{error.message}: {ref!r}", hint=hint)


def stale_or_gone(error: StaleRefError, ref: ObjectRef, reader: native.Reader, name: str) -> ShmStoreError:
    """Return the error for a reader's stale reference, which may be so because its store was removed."""
    if reader.named():
        return stale(error, ref, reader.store_id)
    if os.path.lexists(path_of(name)):
        return StoreClosedError(
            f"store {shown(name)} was removed and created again, and this reader still maps the removed one",
            hint="close this reader, and attach again with the new writer's handle or by name",
        )
    return StoreNotFoundError(
        f"store {shown(name)} was removed, and {ref!r} is not in what this reader still maps",
        hint="close this reader, and attach again once a writer has created the store (attach(name, wait=seconds))",
    )


def not_opened(
    error: Exception,
    name: str,
    what: Literal["arena", "rank"],
    number: int | None,
    *,
    ranks: int,
    allow_uid: int,
    required: native.Options | None = None,
    waited: float | None = None,
) -> Exception:
    """Return the error of C for a store, or an arena or rank of it, that could not be opened, with what was wrong.

    `ranks`, if not 0, the options `required` and `allow_uid` are those that the caller has asked for.
    """
    match error:
        case StoreNotFoundError():
            return not_found(error, name, waited)
        case WriterActiveError():
            return active(name, number, required, allow_uid)
        case RankInUseError():
            return in_use(name, number or 0)
        case LayoutMismatchError(_code=native.OTHER_OPTIONS) if required is not None:
            with closing(Inspector(name, allow_uid)) as inspector:
                differ = differences(inspector.facts(), required)
            return _other_options(name, differ, "open it with these, or let on_mismatch='recreate' replace it")
        case LayoutMismatchError(_code=native.OTHER_RANKS):
            return _other_ranks(name, ranks)
        case LayoutMismatchError():
            return cannot_open(classify(name))
        case ForeignStoreError():
            return foreign(name, allow_uid=allow_uid)
        case SparseStoreError():
            return SparseStoreError(f"store {shown(name)}: {error.message}")
        case CorruptStoreError():
            return CorruptStoreError(
                f"the tables of store {shown(name)} contradict themselves",
                hint="`shmstore verify NAME` says what is wrong; `shmstore gc --yes --force NAME` removes the store",
            )
        case OSError():
            return unusable(error, name)
        case ValueError():
            others = what == "rank" and (number or 0) < ranks
            return _other_ranks(name, ranks) if others else _there_is_no(what, number, name)
    return error


def active(
    name: str,
    arena: int | None = native.ANY_ARENA,
    asked: native.Options | None = None,
    allow_uid: int = native.OWN_UID,
) -> WriterActiveError | LayoutMismatchError:
    """Return the error for a store whose writers are alive, or the one of that arena; it names their processes.

    If other options were `asked` for, waiting does not help with a store of several writers: it says which differ.
    """
    what = "has no free arena"
    with suppress(ShmStoreError, OSError), closing(Inspector(name, allow_uid)) as inspector:  # or of another version
        first = inspector.facts()
        n_writers = first["n_writers"]
        differ = [] if asked is None else differences(first, asked)
        if differ and asked is not None and max(n_writers, asked.n_writers) > 1:
            return _other_options(
                name, differ, "give all its writers the same options; a store is never replaced while a writer lives"
            )
        arenas = range(n_writers) if arena in (None, native.ANY_ARENA) else [arena]
        who = _processes(_writers(inspector, arenas), name) or "none"
        what = f"{what if n_writers > 1 else 'has its one writer'} (n_writers={n_writers}); living writers: {who}"
    return WriterActiveError(
        f"store {shown(name)} {what}",
        hint="wait until a writer has ended, or create the store with a larger n_writers; if none is alive, "
        f"`fuser {path_of(name)}` names the process that is still ending",
    )


def written(name: str) -> WriterActiveError:
    """Return the error for a store that is not removed, because processes have it open; it names them."""
    pids: list[int] = []
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:  # else it is of another version
        facts = inspector.facts()
        pids = [*_writers(inspector, range(facts["n_writers"])), *filter(None, [facts["owner_pid"]])]
    hint = "close the writer that this process has" if os.getpid() in pids else None
    who = _processes(pids, name) or "a living process"
    return WriterActiveError(f"store {shown(name)} is open in {who}", hint=hint)


def _writers(inspector: Inspector, arenas: Iterable[Any]) -> list[int]:
    """Return the processes of the living writers of these arenas."""
    seen = map(inspector.facts, arenas)
    return [facts["writer_pid"] for facts in seen if facts["writer_alive"] and facts["writer_pid"]]


def _processes(pids: Iterable[int], place: str | None = None) -> str:
    """Return the processes in words; "" for none. Of a store they may be of another PID namespace."""
    found: list[int | str] = list(dict.fromkeys(pids))
    for pid in of_other_namespaces(place, dict.fromkeys(pids)) if place else ():
        found[found.index(pid)] = f"{pid} (of another PID namespace)"
    found = [_with_title(one) if isinstance(one, int) else one for one in found]
    return f"process{'es' if len(found) > 1 else ''} {listed(found)}" if found else ""


def _with_title(pid: int) -> str:
    """Return a process with its title, and whether its parent has ended, as a server's worker may outlive that."""

    def look(pid: int | str) -> tuple[str, str, str]:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            title, _, rest = file.read().partition("(")[2].rpartition(") ")
        _, parent, _, session = rest.split()[:4]
        return shown(title)[1:-1], parent, session

    said = str(pid)
    with suppress(OSError):  # it has ended meanwhile, or its parent is of another PID namespace
        title, parent, session = look(pid)
        said = f"{pid} ({title})"
        if session not in (str(pid), look(parent)[2]):  # only a process that others have adopted
            said = f"{pid} ({title}, whose parent has ended)"
    return said


def creating(name: str, waited: float | None = None) -> WriterActiveError:
    """Return the error for a store whose creation is not over, or takes too long; it names the process that creates it.

    A young file that is empty is being created as far as anybody can see, also if its creator is dead.
    """
    pids: tuple[int, ...] = ()
    with suppress(ShmStoreError, OSError):  # it has gone meanwhile
        file = classify(name)
        pids = holders(file.device, file.inode)
    who = _processes(pids) or "another process"
    after = "" if waited is None else f", after {waited:g} seconds"
    longer = "try again in some seconds" if waited is None else "wait longer (wait=seconds)"
    return WriterActiveError(
        f"store {shown(name)} is still being created by {who}{after}",
        hint=f"let that process continue, or end it; or {longer}",
    )


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


def _has(name: str, option: Literal["n_readers", "n_writers"], otherwise: str) -> int | str:
    """Return how many ranks or writers a store is for, or `otherwise` if that is not to be known any more."""
    with suppress(ShmStoreError, OSError):
        return probe(name)[option] or otherwise
    return otherwise


def _other_options(name: str, differ: list[str], hint: str) -> LayoutMismatchError:
    return LayoutMismatchError(f"store {shown(name)} was created with other options: {', '.join(differ)}", hint=hint)


def not_found(error: StoreNotFoundError, name: str, waited: float | None = None) -> ShmStoreError:
    """Return the same error with the store's name and how long it was waited for."""
    if not os.path.isdir(folder := parts_of(name)[0]):
        return _no_folder(folder)
    after = f", after {waited:g} seconds" if waited else ""
    named = StoreNotFoundError(f"store {shown(name)}: {error.message}{after}", hint=error.hint)
    named._code = error._code  # `open` asks whether it is being created
    return named


def _no_folder(folder: str) -> SharedMemoryError:
    hint = f"mount it, or pass the folder at which this process has it: dir=, or {VARIABLE}"
    return SharedMemoryError(f"there is no folder {cut(folder)}", number=errno.ENOENT, hint=hint)


_LACKING: Final = (errno.EOPNOTSUPP, errno.ENODEV, errno.ENOLCK)
"""What the look for the kind of file system, fallocate, mmap, and the look for locks that a mapping keeps say."""


def unusable(error: OSError, name: str) -> ShmStoreError:
    """Return the error for a system call that failed; an error of shmstore comes back unchanged."""
    if isinstance(error, ShmStoreError):
        return error
    folder, hint = parts_of(name)[0], None
    what = f"{cut(path_of(name))} cannot be used: {error.strerror}"
    if error.errno == errno.EPERM:
        hint = "a process gives a store only to a group of its own: see gid, and id -G"
    elif error.errno == errno.ENOENT and not os.path.isdir(folder):
        return _no_folder(folder)
    elif error.errno in _LACKING:
        what += f"; {cut(folder)} is on {file_system(folder) or 'a file system'}, which lacks what a store needs"
        hint = f"use a folder of a tmpfs: dir=, or {VARIABLE}"
    return SharedMemoryError(what, number=error.errno, hint=hint)


def foreign(name: str, may_allow: bool = True, allow_uid: int = native.OWN_UID) -> ForeignStoreError:
    """Return the error for a store that belongs to another user, or that other users may open.

    `may_allow` says whether the call has the option `allow_uid`, and that is what it was.
    """
    error, path = another_user(name), path_of(name)
    with suppress(OSError):  # it has gone meanwhile
        seen = stat_of(name)
        mode = stat.S_IMODE(seen.st_mode)
        expected = os.geteuid() if allow_uid == native.OWN_UID else allow_uid
        if may_allow and seen.st_uid == expected and 0o600 | mode & 0o066 not in MODES:
            return ForeignStoreError(
                f"store {shown(name)} has mode {mode:04o}: who may only read it could lock ranks and arenas",
                hint=f"chmod 600 {path}, or 660 if its group shares it",
            )
        if seen.st_uid == os.geteuid() and not seen.st_mode & 0o077:
            return ForeignStoreError(
                f"store {shown(name)} belongs to this user, {seen.st_uid}, and allow_uid names another",
                hint="omit allow_uid, or pass the name of that user's store",
            )
        if seen.st_uid == os.geteuid():
            error = ForeignStoreError(
                f"store {shown(name)} has mode {mode:04o}: others than its owner may open it",
                hint=f"chmod 600 {path} if nobody else needs it",
            )
        if may_allow and os.access(path, os.R_OK | os.W_OK, effective_ids=True):  # else it cannot help
            error.hint += f", or pass allow_uid={seen.st_uid} if you trust whoever may write to it"
        elif seen.st_mode & 0o060 == 0o060:
            error.hint += f", or as a member of group {seen.st_gid} (of a pod: supplementalGroups)"
    return error


def _other_ranks(name: str, ranks: int) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"store {shown(name)} has {_has(name, 'n_readers', 'another number of')} ranks, not {ranks}",
        hint="give all processes the same n_readers (world_size * data_parallel_size in the configuration of caches), "
        "and a reader the handle that the writer made",
    )


_NEXT: Final[dict[str, str | None]] = {
    "foreign": "choose another name; shmstore ls lists the stores",
    "blank": "choose another name; shmstore ls lists the stores",
    "being created": "wait for its writer to finish",
    "other version": None,  # the default
}


def cannot_open(file: SegmentFile) -> ShmStoreError:
    """Return the error for a file that does not have the layout of a store of this version, or cannot be read."""
    if file.state == "unreadable":
        return another_user(file.place)
    hint = _NEXT.get(file.state, "it cannot be opened; shmstore gc --yes --force NAME removes it")
    if file.place.startswith("/proc/"):
        hint = "this descriptor is not a store's, or it is another process's: pass fd=, which handle.send has sent"
    what = file.state if file.state != "ok" else "a store on a disk, made before this host was started"
    return LayoutMismatchError(f"{path_of(file.place)}: {file.problem or what}", hint=hint)


def in_use(name: str, rank: int) -> RankInUseError:
    """Return the error for a rank that is taken; it names the process that has it."""
    pid = native.rank_pid(name, rank)
    hint = None
    if pid == os.getpid():  # or it has the same pid in another PID namespace
        hint = "if that is this process, close the reader that has it and drop its views; else attach as another rank"
    holder = _processes([pid], name) if pid else "a live reader"
    return RankInUseError(f"rank {rank} of store {shown(name)} is taken by {holder}", hint=hint)


def all_in_use(name: str, ranks: int) -> RankInUseError:
    """Return the error for a store that has no free rank; it names the processes that have them."""
    pids = [native.rank_pid(name, rank) for rank in range(ranks)]
    who = f" by {_processes(pids, name)}" if all(pids) else ""
    hint = "close a reader, end a process that should not be there, or create the store for more"
    return RankInUseError(f"all {ranks} ranks of store {shown(name)} are taken{who}", hint=hint)


def _there_is_no(what: Literal["arena", "rank"], number: int | None, name: str) -> ValueError:
    option: Literal["n_readers", "n_writers"] = "n_writers" if what == "arena" else "n_readers"
    return ValueError(f"store {shown(name)} has no {what} {number}: {option} is {_has(name, option, 'lower')}")


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
    span = -(-extra // native.ALIGN) * native.ALIGN + -(-(nbytes or 0) // native.ALIGN) * native.ALIGN
    needed = f"{nbytes} bytes ({span} with key and metadata) needed"
    hint = None
    if resource == "leases":
        what = f"all {refusal['max_leases']} lease entries are taken by unread references and unfinished puts"
    elif resource == "slots":
        what = f"all {refusal['max_objects']} slots are taken by objects that are held"
    elif resource == "quota":
        what = (
            f"{needed}, and kind {shown(kind)} has {refusal['kind_bytes']} of its quota of {refusal['quota']} bytes, "
            "too much of it held"
        )
    else:
        free = refusal["capacity"] - refusal["used_bytes"]
        what = (
            f"{needed} in one piece, {free} of {refusal['capacity']} free, {refusal['reclaimable']} reclaimable, "
            f"at most {refusal['longest']} of both in one piece"
        )
        if free + refusal["reclaimable"] >= span:
            hint = f"held objects split the space: {StoreFullError.default_hint}"
    if refusal["kept"]:
        what += f"; {refusal['kept']} bytes protected, held by the writer or in unfinished puts"
    by_rank = [f"rank {number}: {size} bytes" for number, size in sorted(held.items())]
    by_writer = [f"writer {number}: {size} bytes" for number, size in sorted(writers.items())]
    if by_rank or by_writer:
        what += "; held by " + listed(by_rank + by_writer)
    after = f", also after a wait of {waited:g} seconds" if waited else ""
    full = StoreFullError(
        f"{StoreFullError.default_message}{after}: {what}",
        needed=nbytes,
        held_bytes_by_rank=held,
        held_bytes_by_writer=writers,
        resource=resource,
        hint=hint,
    )
    if absent := [rank for rank in refusal["awaited"] if rank in held]:
        full.hint = (
            f"these ranks have never attached: {listed(absent)}; start them, or call retire(rank) in each writer that "
            f"hands out references; or {full.hint}"
        )
    if len(writer.groups) > 1:
        full.hint += "; a lease that assign_group(ref, group) has given to no group waits for all of them"
    return full
