"""Turn error codes of C into errors that tell the caller what was wrong; nothing here runs before a failure."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from typing import Any, Final, Literal

from shmstore.bindings import store as native
from shmstore.bindings.inspect import FLAGS, Inspector, node_of
from shmstore.errors import (
    CorruptStoreError,
    ForeignStoreError,
    LayoutMismatchError,
    RankInUseError,
    SerdeError,
    SharedMemoryError,
    ShmStoreError,
    StaleRefError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
    cut,
    held_by,
    kind_of,
    listed,
    shown,
)
from shmstore.files import SegmentFile, another_user, classify, holders, of_other_namespaces
from shmstore.places import VARIABLE, file_system, parts_of, path_of
from shmstore.refs import ObjectRef
from shmstore.serde.protocol import Encoded, Layout


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


def active(
    name: str, arena: int | None = native.ANY_ARENA, asked: native.Options | None = None
) -> WriterActiveError | LayoutMismatchError:
    """Return the error for a store whose writers are alive, or the one of that arena; it names their processes.

    If other options were `asked` for, waiting does not help with a store of several writers: it says which differ.
    """
    free = "" if arena in (None, native.ANY_ARENA) else f" {arena}"  # in all of them, or in this one
    what, how, differ, n_writers = f"has no free arena{free}", "", [], 0
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:  # else it is of another version
        first = inspector.facts()
        n_writers = first["n_writers"]
        differ = [] if asked is None else differences(first, asked)
        if differ and asked is not None and max(n_writers, asked.n_writers) > 1:
            return _other_options(
                name, differ, "give all its writers the same options; a store is never replaced while a writer lives"
            )
        who = _processes(_writers(inspector, [int(free)] if free else range(n_writers)), name)
        how = f" (n_writers={n_writers}); living writers: {who or 'none'}"
    if n_writers == 1:
        what = "has a writer already"
    if differ:
        how += f"; its options are others, too: {', '.join(differ)}"
    return WriterActiveError(
        f"store {shown(name)} {what}{how}",
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


def _writers(inspector: Inspector, arenas: Iterable[int]) -> list[int]:
    """Return the processes of the living writers of these arenas."""
    seen = map(inspector.facts, arenas)
    return [facts["writer_pid"] for facts in seen if facts["writer_alive"] and facts["writer_pid"]]


def _processes(pids: Iterable[int], place: str | None = None) -> str:
    """Return the processes in words; "" for none. Of a store they may be of another PID namespace."""
    found: list[int | str] = list(dict.fromkeys(pids))
    for pid in of_other_namespaces(place, pids) if place else ():
        found[found.index(pid)] = f"{pid} (of another PID namespace)"
    return f"process{'es' if len(found) > 1 else ''} {listed(found)}" if found else ""


def creating(name: str, waited: float) -> WriterActiveError:
    """Return the error for a store whose creation takes too long; it names the process that creates it."""
    pids: tuple[int, ...] = ()
    with suppress(ShmStoreError, OSError):  # it has gone meanwhile
        file = classify(name)
        pids = holders(file.device, file.inode)
    who = _processes(pids) or "another process"
    return WriterActiveError(
        f"store {shown(name)} is still being created by {who}, after {waited:g} seconds",
        hint="let that process continue, or end it; or wait longer (wait=seconds)",
    )


def damaged(name: str, arena: int | None) -> CorruptStoreError:
    """Return the error for a store that is damaged, or whose arena is; `ANY_ARENA`: each that has no living writer."""
    hint, where = "remove it with `shmstore gc --yes --force NAME`", ""
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:  # else its superblock is
        n_writers = inspector.facts()["n_writers"]
        alive = [inspector.facts(number)["writer_alive"] for number in range(n_writers)]
        if n_writers > 1:
            free = [number for number in range(n_writers) if not alive[number]]
            numbers = free if arena == native.ANY_ARENA else [arena or 0]
            where = f"arena{'s' if len(numbers) > 1 else ''} {listed(numbers)} of "
            hint = f"join another arena; or close all its writers, and {hint}"
    return CorruptStoreError(
        f"the tables of {where}store {shown(name)} contradict themselves",
        hint=f"`shmstore verify NAME` says what is wrong; {hint}",
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
            has = bool(facts["flags"] & bit)
            differ.append(f"eviction is {'fifo' if has else 'clock'}" if flag == "fifo" else f"{flag} is {has}")
    if (has_node := node_of(facts["flags"])) != (node := node_of(asked.flags)):
        differ.append(f"numa_node is {has_node}, not {node}")
    return differ


def _other_options(name: str, differ: list[str], hint: str) -> LayoutMismatchError:
    return LayoutMismatchError(f"store {shown(name)} was created with other options: {', '.join(differ)}", hint=hint)


def other_options(name: str, asked: native.Options) -> LayoutMismatchError:
    """Return the error for a store that was created with other options; it says which."""
    with closing(Inspector(name)) as inspector:
        differ = differences(inspector.facts(), asked)
    return _other_options(name, differ, "open it with its own options, or let on_mismatch='recreate' replace it")


def not_found(error: StoreNotFoundError, name: str, by_handle: bool, waited: float | None = None) -> ShmStoreError:
    """Return the same error with the store's name and how long it was waited for, and a hint at the likely mistake."""
    if not os.path.isdir(folder := parts_of(name)[0]):
        hint = f"mount it, or pass the folder at which this process has it: dir=, or {VARIABLE}"
        return SharedMemoryError(f"there is no folder {cut(folder)}", number=errno.ENOENT, hint=hint)
    hint = error.hint
    if by_handle and error._code == native.NO_STORE:
        hint = "its last writer has closed it (what create made goes then; open makes one that stays), or runs in a "
        hint += "container that sees another folder (share it, see dir= and SHMSTORE_DIR; or /dev/shm with --ipc)"
    after = f", after {waited:g} seconds" if waited else ""
    named = StoreNotFoundError(f"store {shown(name)}: {error.message}{after}", hint=hint)
    named._code = error._code  # `open` asks whether it is being created
    return named


_LACKING: Final = {
    errno.EOPNOTSUPP: "the reservation of space (fallocate)",
    errno.ENODEV: "shared mappings (mmap)",
    errno.ENOLCK: "locks that a mapping keeps",
    errno.EREMOTE: "memory that is the same for all who have the file",
}


def unusable(error: OSError, name: str) -> ShmStoreError:
    """Return the error for a system call that failed; an error of shmstore comes back unchanged."""
    if isinstance(error, ShmStoreError):
        return error
    path, hint = cut(path_of(name)), None
    if error.errno == errno.EPERM:
        hint = "a process gives a store only to a group of its own: see gid, and id -G"
    elif lacks := _LACKING.get(error.errno or 0):
        folder = parts_of(name)[0]
        return SharedMemoryError(
            f"{path} cannot be used: {cut(folder)} is on {file_system(folder) or 'a file system'}, which lacks {lacks}",
            number=error.errno,
            hint=f"use a folder of a tmpfs: dir=, or {VARIABLE}",
        )
    return SharedMemoryError(f"{path} cannot be used: {error.strerror}", number=error.errno, hint=hint)


def foreign(name: str, may_allow: bool = True) -> ForeignStoreError:
    """Return the error for a store that belongs to another user, or that other users may open.

    `may_allow` says whether the call has the option `allow_uid`.
    """
    error, path = another_user(name), path_of(name)
    with suppress(OSError):  # it has gone meanwhile
        seen = os.lstat(path)
        if seen.st_uid == os.geteuid():
            error = ForeignStoreError(
                f"store {shown(name)} has mode {stat.S_IMODE(seen.st_mode):04o}: others than its owner may open it",
                hint=f"chmod 600 {path} if nobody else needs it",
            )
        if may_allow and os.access(path, os.R_OK | os.W_OK, effective_ids=True):  # else it cannot help
            error.hint += f", or pass allow_uid={seen.st_uid} if you trust whoever may write to it"
    return error


def exists(name: str) -> StoreExistsError:
    """Return the error for a name that is taken; it says so if the file is not a store."""
    with suppress(OSError):  # the file has gone meanwhile
        file = classify(name)
        if file.state in ("foreign", "blank", "unreadable"):
            return StoreExistsError(
                f"{path_of(name)} exists and {file.problem}",
                hint="choose another name, or omit it; shmstore gc does not remove this file",
            )
    return StoreExistsError(f"a store named {shown(name)} exists already")


def another_layout(error: LayoutMismatchError, name: str, ranks: int) -> ShmStoreError:
    """Return the error for a file that is not a store of so many ranks; it says what it is instead."""
    return other_ranks(name, ranks) if error._code == native.OTHER_RANKS else cannot_open(classify(name))


def other_ranks(name: str, ranks: int) -> LayoutMismatchError:
    """Return the error for a store that has another number of ranks than the caller's handle or configuration says."""
    has = "another number of"
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:
        has = str(inspector.facts()["n_readers"])
    return LayoutMismatchError(
        f"store {shown(name)} has {has} ranks, not {ranks}",
        hint="give all processes the same n_readers (world_size * data_parallel_size in the configuration of caches), "
        "and a reader the handle that the writer made",
    )


def cannot_open(file: SegmentFile) -> ShmStoreError:
    """Return the error for a file that does not have the layout of a store of this version, or cannot be read."""
    store = f"store {shown(file.place)}"
    if file.state == "unreadable":
        return another_user(file.place)
    if file.state in ("foreign", "blank"):
        return LayoutMismatchError(
            f"{path_of(file.place)} {file.problem}", hint="choose another name, or remove it yourself"
        )
    if file.state in ("being created", "unfinished"):
        alive, dead = "wait for its writer to finish", "its writer died during it; shmstore gc removes the file"
        return LayoutMismatchError(
            f"the creation of {store} was not completed", hint=alive if file.writer_alive else dead
        )
    if file.state == "other version":
        return LayoutMismatchError(f"{store} was {file.problem}")
    return LayoutMismatchError(
        f"{store}: {file.problem}", hint="it cannot be opened; shmstore gc --yes --force NAME removes it"
    )


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // native.ALIGN) * native.ALIGN


_SAMPLE: Final = 64


def _leases(writer: native.Writer, name: str) -> Iterator[dict[str, Any]]:
    """Yield the open leases of the writer's store, as far as it can be looked at."""
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:
        if inspector.facts()["store"] == writer.store_id:
            yield from inspector.leases(_SAMPLE)


def _most_wait_for_all(writer: native.Writer, name: str) -> bool:
    """Say whether most of some open leases wait for the ranks of all groups, since nobody has assigned a group."""
    some = islice(_leases(writer, name), _SAMPLE)
    groups = [lease["group"] for lease in some if any(lease["owed"]) and not lease["held"]]
    return groups.count(0) * 2 > len(groups)


def group_of_lease(writer: native.Writer, name: str, ref: ObjectRef) -> str:
    """Return in words which group a lease of this writer waits for."""
    for lease in _leases(writer, name):
        if (lease["writer"], lease["number"]) == (writer.arena, ref.lease) and lease["group"]:
            return f"group {lease['group'] - 1}"
    return "another group"


def there_is_no(what: Literal["arena", "rank"], number: int | None, name: str) -> ValueError:
    """Return the error for an arena or a rank that the store does not have; it says which it has."""
    has = "fewer of them"
    with suppress(ShmStoreError, OSError), closing(Inspector(name)) as inspector:
        option = "n_writers" if what == "arena" else "n_readers"
        count = inspector.facts()[option]
        has = f"{what} 0 only ({option} is 1)" if count == 1 else f"{what}s 0 to {count - 1} ({option} is {count})"
    return ValueError(f"store {shown(name)} has no {what} {number}; it has {has}")


def full(
    writer: native.Writer,
    name: str,
    refusal: dict[str, Any],
    resource: Literal["bytes", "slots", "leases", "quota"] | None,
    nbytes: int | None = None,
    extra: int = 0,
    kind: str | None = None,
    waited: float = 0.0,
) -> StoreFullError:
    """Return the error for a store that has run out of `resource`; it says who holds how much, and what is left.

    `extra` is the size of key and metadata, which lie in front of the payload's `nbytes`. `waited`: seconds.
    """
    span = _aligned(extra) + _aligned(nbytes or 0)
    held, writers = refusal["held"], refusal["held_by_writer"]
    hint = None
    if resource == "leases":
        what = f"all {refusal['max_leases']} lease entries are taken by unread references and unfinished puts"
    elif resource == "slots":
        what = f"all {refusal['max_objects']} slots are taken by objects that are held"
    elif resource == "quota":
        what = (
            f"{nbytes} bytes ({span} with key and metadata) needed, and kind {shown(kind)} has "
            f"{refusal['kind_bytes']} of its quota of {refusal['quota']} bytes, too much of it held"
        )
    else:
        free = refusal["capacity"] - refusal["used_bytes"]
        what = (
            f"{nbytes} bytes ({span} with key and metadata) needed in one piece, {free} of {refusal['capacity']} free, "
            f"{refusal['reclaimable']} reclaimable, at most {refusal['longest']} of both in one piece"
        )
        if free + refusal["reclaimable"] >= span:
            hint = f"held objects split the space: {StoreFullError.default_hint}"
    if refusal["kept"]:
        what += f"; {refusal['kept']} bytes protected, held by the writer or in unfinished puts"
    after = f", also after a wait of {waited:g} seconds" if waited else ""
    message = f"{StoreFullError.default_message}{after}: {what}{held_by(held, writers)}"
    full = StoreFullError(
        message, needed=nbytes, held_bytes_by_rank=held, held_bytes_by_writer=writers, resource=resource, hint=hint
    )
    absent = [rank for rank in refusal["awaited"] if rank in held]
    if absent:
        one = len(absent) == 1
        retire = "retire(rank) in each writer that hands out references" if writers else "retire(rank)"
        who = f"rank {absent[0]} has" if one else f"ranks {listed(absent)} have"
        full.hint = f"{who} never attached: start {'it' if one else 'them'}, or {retire}; or {full.hint}"
    if len(writer.groups) > 1 and _most_wait_for_all(writer, name):
        full.hint = (
            f"leases wait for the ranks of all {len(writer.groups)} groups: before a reference is sent, call "
            f"assign_group(ref, group), or with a cache sender.assign_group(sent, engine); or {full.hint}"
        )
    return full


def _wrong_sizes(made: Any) -> str | None:
    if not isinstance(made.meta, bytes):
        return f"meta must be bytes, not {type(made.meta).__name__}"
    if not isinstance(made.nbytes, int) or not 0 <= made.nbytes <= native.MAX_CAPACITY:
        return f"nbytes must be an int from 0 to {native.MAX_CAPACITY}, not {shown(made.nbytes)}"
    return None


def _wrong_places(made: Any, name: Literal["spans", "fills"]) -> str | None:
    places = getattr(made, name)
    try:
        for offset, size, source in places if len(places) else ():
            if not (0 <= offset <= offset + size <= made.nbytes):
                return f"{name}: {size} bytes at {offset} do not lie within the {made.nbytes} bytes of the payload"
            if name == "spans" and size and not 0 < source < 1 << 64:
                return f"spans: the source of {size} bytes at {offset} must be an address, not {shown(source)}"
    except (TypeError, ValueError):
        source_is = "an address" if name == "spans" else "what fill() takes"
        return f"{name} must be a sequence of triples: an offset, a size and {source_is}"
    return None


def wrong_encoding(made: Any) -> SerdeError | None:
    """Return what is wrong with the result of a serializer's `encode`; None if it is an `Encoded`."""
    return _wrong(made, Encoded, "spans", "fills")


def wrong_layout(made: Any) -> SerdeError | None:
    """Return what is wrong with the result of a serializer's `layout`; None if it is a `Layout`."""
    return _wrong(made, Layout)


def _wrong(made: Any, expected: type, *places: Literal["spans", "fills"]) -> SerdeError | None:
    wrong: str | None = f"it must have the fields of {expected.__name__}, not be {kind_of(made)}"
    if all(hasattr(made, name) for name in expected.__annotations__ if name != "keepalive"):
        wrong = next(filter(None, (_wrong_sizes(made), *(_wrong_places(made, name) for name in places))), None)
    return SerdeError(f"{SerdeError.default_message}: {wrong}") if wrong else None
