"""`Openable` is what a writer has before its first put: `open`, `create`, `join`, `recover`, its names and `close`."""

import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Self, Unpack

import numpy as np

from shmstore.bindings import store as native
from shmstore.bindings.claims import Claims
from shmstore.device import HostMemory
from shmstore.errors import (
    CorruptStoreError,
    LayoutMismatchError,
    NoArenaError,
    StoreExistsError,
    StoreNotFoundError,
    WriterActiveError,
    check_flags,
    shown,
    unless_interrupted,
    unnamed,
)
from shmstore.files import PREFIX
from shmstore.places import Folder, file_system, parts_of, place_of, seen_by_others
from shmstore.refs import StoreHandle
from shmstore.serde import ObjectSerde
from shmstore.store import diagnostics, orphans
from shmstore.store.arguments import (
    LOOK_AGAIN,
    Closable,
    checked_name,
    expected_store,
    int_of,
    seconds_of,
    serde_of,
)
from shmstore.store.kinds import checked_quotas, set_quotas
from shmstore.store.options import StoreOptions, shows_options, store_options

_log = logging.getLogger(__name__)


@cache
def _warn_of_disk(folder: str) -> None:
    """Log, once for a folder, that it is not memory."""
    if (kind := file_system(folder)) not in ("tmpfs", "hugetlbfs", ""):
        _log.warning(
            "stores in %s are on %s: the system writes what they hold to its disk, which slows puts; use a tmpfs",
            folder,
            kind,
        )


@unnamed
class Openable(Closable):
    """The part of a writer that opens and closes its store."""

    _claims: Claims | None = None
    _registered: HostMemory | None = None

    def __init__(self, writer: Any = None, serde: ObjectSerde | None = None, *_: Any, **__: Any) -> None:
        """Wrap an opened segment; callers use `open`, `create` or `recover`."""
        if not isinstance(writer, native.Writer):
            raise TypeError("make a writer by ObjectStoreWriter.open(...), .create(...), .join(...) or .recover(name)")
        self._writer = writer
        self._serde = serde_of(serde)
        self._place = writer.place
        folder, name = parts_of(writer.place)
        self._handle = StoreHandle(name, writer.store_id, writer.n_readers, seen_by_others(folder))
        self._recovered = 0
        self._open = True
        self._pid = os.getpid()

    @classmethod
    @shows_options
    def create(
        cls,
        name: str | None = None,
        *,
        writes: bool = True,
        memfd: bool = False,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        **options: Unpack[StoreOptions],
    ) -> Self:
        """Create a store and be its writer; all the space that it may fill is reserved before this returns.

        The store is removed when its last writer closes. One that must outlive its processes is made by `open`.
        The options are those of `StoreOptions`: `capacity` and `n_readers` are what each store needs, and the rest
        has defaults. With `n_writers` above 1 this process is writer 0, and the others `join`.

        With `name` None the name is unique and the store ends with its process: a normal exit removes it, and after a
        kill the next `create` does.
        With `writes` False this process owns the store and has no arena: `n_writers` others `join`, and a put here is a
        NoArenaError. The store is removed when the owner and all writers have closed.
        With `memfd` the store has no file in any folder, and lives as long as a process has it open. Its handle leads
        to it until this writer is closed, in processes that see this one in /proc and may look into it; others get the
        descriptor by `StoreHandle.send`. Nobody can change its size. No folder bounds it, so a capacity that the host
        does not have is no StoreSpaceError.
        `quotas` limits kinds of objects, each to a fraction of the capacity (a float) or to a number of bytes (an int).
        A put of a kind that has filled its quota evicts objects of its own kind. Eviction spares objects that were used
        since they were last considered.
        Raises StoreExistsError, StoreSpaceError if the folder has too little room, SharedMemoryError if it cannot be
        used, and ValueError for numbers out of range.
        """
        check_flags(writes=writes, memfd=memfd)
        serde = serde_of(serde)
        asked, dir, access = store_options(**options)
        chosen = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}" if name is None else checked_name(name)
        limits = checked_quotas(quotas, asked.capacity)
        if quotas and not writes:
            raise ValueError("quotas are those of a writer's arena: with writes=False, pass them to join")
        if memfd and dir is not None:
            raise TypeError("a store with memfd=True is in no folder, so pass no dir")
        call = (name is None) * native.EPHEMERAL | (not writes) * native.OWNS | memfd * native.MEMFD
        place = chosen if memfd else place_of(chosen, dir)
        return cls._create(place, asked._replace(flags=asked.flags | call), serde, limits, *access)

    @classmethod
    def _create(
        cls,
        name: str,
        options: native.Options,
        serde: ObjectSerde | None,
        quotas: Mapping[str, int] | None,
        mode: int,
        gid: int | None,
    ) -> Self:
        orphans.remove_dead(parts_of(name)[0])
        writer = None
        try:
            writer = native.Writer.create(name, options, mode, gid)
            if quotas:
                set_quotas(writer, quotas)
            _log.debug("created store %s: %d bytes for %d readers", name, options.capacity, options.n_readers)
            _warn_of_disk(parts_of(name)[0])
            made = cls(writer, serde)
            if options.flags & native.EPHEMERAL:
                orphans.close_at_exit(made)
            return made  # not the call itself: its value is not yet the caller's, and this block would be over
        except StoreExistsError:
            raise diagnostics.exists(name) from None
        except BaseException as error:
            if writer is not None:
                writer.close(unlink=True)  # an interrupt: nobody else knows of it
            if isinstance(error, unless_interrupted(OSError)):
                raise diagnostics.unusable(error, name) from None
            raise

    @classmethod
    def join(
        cls,
        handle_or_name: str | StoreHandle | None = None,
        index: int | None = None,
        *,
        keep_leases: bool = False,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
        dir: Folder | None = None,
        fd: int | None = None,
    ) -> Self:
        """Become one of the writers of a store that was created with `n_writers`.

        The writer takes the arena of that number, or the first one without a living writer, new or left by a dead one.
        An arena that is damaged is passed by, with a warning in the log.
        What is in the arena comes along, and `recovered` is the number of its objects. Its leases end, because the
        requests of the dead writer died with it; `keep_leases` keeps them, but for those on others' objects that these
        have evicted since its death. `quotas`, `allow_uid` and `dir` are those of `recover`, and so are the errors.
        `fd` is that of `ObjectStoreReader.attach`.
        Raises WriterActiveError if the arena, or each of them, has a living writer, StoreSpaceError if nobody has taken
        it before and the folder has no room for it, and ValueError if there is no arena of that number.
        """
        expected = expected_store(handle_or_name, allow_uid, "handle_or_name", dir, fd)
        arena = native.ANY_ARENA if index is None else int_of("index", index, 0, native.MAX_WRITERS - 1)
        made = cls._recover(expected, serde, quotas, arena=arena, keep_leases=keep_leases)
        if orphans.is_ephemeral(made._place):
            orphans.close_at_exit(made)
        return made

    @classmethod
    def recover(
        cls,
        name: str | StoreHandle,
        *,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
        dir: Folder | None = None,
    ) -> Self:
        """Take over the store of a writer that is dead or closed: every committed object, its key and open leases.

        Objects that were not committed are dropped, and so are leases on objects of other writers that these have
        evicted since its death. With `quotas`, as for `create`, these replace the store's quotas; a kind that exceeds
        its new one shrinks at its next put. The store must be this user's and closed to others; with `allow_uid` it
        must be that user's, whatever its mode. `dir` is its folder, by default the handle's or, of a name, as for
        `create`.
        Raises WriterActiveError while a writer lives, StoreNotFoundError, ForeignStoreError, CorruptStoreError if it is
        damaged, LayoutMismatchError if it is not a store of this version or not the store of the handle, and
        SharedMemoryError if shared memory cannot be used.
        """
        expected = expected_store(name, allow_uid, "name", dir)
        return cls._recover(expected, serde, quotas)

    @classmethod
    def _recover(
        cls,
        expected: tuple[str, int, int, int],
        serde: ObjectSerde | None,
        quotas: Mapping[str, float] | None,
        *,
        options: native.Options | None = None,
        required: native.Options | None = None,
        arena: int | None = None,
        keep_leases: bool = True,
    ) -> Self:
        name, serde = expected[0], serde_of(serde)
        check_flags(keep_leases=keep_leases)
        try:
            writer = native.Writer.recover(*expected, required, arena, keep_leases)
        except unless_interrupted(Exception) as error:
            raise diagnostics.not_opened(error, expected, "arena", arena, required) from None
        try:
            if (limits := checked_quotas(quotas, writer.stats()["capacity"])) is not None:
                set_quotas(writer, limits)
            made = cls(writer, serde)
            made._recovered = writer.count()
            for damaged in writer.damaged:
                _log.warning(
                    "arena %d of store %s is damaged and was passed by; `shmstore verify` says more", damaged, name
                )
            if arena is None or made._recovered:
                _log.info("recovered store %s with %d objects", name, made._recovered)
            else:
                _log.debug("joined store %s as writer %d", name, made.index)
            if options is not None and (differ := diagnostics.differences(writer.options._asdict(), options)):
                _log.warning("accepted store %s, which has other options: %s", name, ", ".join(differ))
            how = native.UNTIL_CLOSED if arena is not None else native.BEYOND_DEATH
            if options is not None and options.flags & native.OUTLIVES:
                how = native.BEYOND_CLOSE
            writer.stay(how)  # last, since it is for good
            return made  # as in `create`
        except BaseException as error:
            writer.close(native.AS_IT_WAS)  # another call can recover it
            if isinstance(error, StoreNotFoundError):
                raise diagnostics.not_found(error, name) from None
            raise

    @classmethod
    @shows_options
    def open(
        cls,
        name: str,
        *,
        on_mismatch: Literal["recreate", "raise", "accept"] = "recreate",
        keep: bool = True,
        keep_leases: bool = False,
        wait: float = 60.0,
        allow_uid: int | None = None,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        **options: Unpack[StoreOptions],
    ) -> Self:
        """Take over the store that a dead or closed writer left under this name, or create it.

        This is the call for a store that outlives its processes: closing keeps it, also if the last writer has come by
        `join` or `recover`. `close(unlink=True)` and `unlink` remove it. With `n_writers` above 1 it is the call for
        every one of them: it takes the first arena without a living writer, and waits up to `wait` seconds while
        another one creates the store. If in doubt, leave `wait` as it is: nothing waits if nobody creates the store.
        The options are those of `StoreOptions`. If the store that is there was created with the same options, all its
        objects come along; `recovered` is their number. Its leases end, because the requests of the dead writer died
        with it; `keep_leases` keeps them. With `keep` False a store that this call creates ends with its processes, as
        one with a generated name does; its name must begin with "shmstore-".
        `allow_uid` is that of `recover`, by default this user if `mode` lets others in. Only that user creates the
        store, or replaces it; for another one the call waits up to `wait` seconds, then raises StoreNotFoundError.

        A store with other options, of another version or damaged is removed and created again, with a warning in the
        log. If readers keep one that differs only in size, and there is no room for both, it is taken as it is.
        With `on_mismatch` "raise" it stays as it was, and LayoutMismatchError or CorruptStoreError says what is wrong.
        With "accept" other options are no mismatch: the store is taken with those it has, also while others write, and
        a warning in the log says which differ; the rest is as with "raise". A file that is not a store is never
        removed: LayoutMismatchError.
        A store is never removed while a writer lives. Raises LayoutMismatchError then if the options differ and
        `n_writers`, there or here, is above 1; else WriterActiveError, unless an arena is free. It is raised, too, when
        `wait` is over. Raises ForeignStoreError, StoreSpaceError, SharedMemoryError and ValueError like
        `recover` and `create`.
        """
        check_flags(keep=keep)
        serde = serde_of(serde)
        asked, dir, access = store_options(**options)
        asked = asked._replace(flags=asked.flags | (native.OUTLIVES if keep else native.EPHEMERAL))
        limits = checked_quotas(quotas, asked.capacity)
        owner = os.geteuid() if allow_uid is None and access[0] & 0o077 else allow_uid
        expected = expected_store(checked_name(name), owner, "name", dir)
        chosen, owns = expected[0], owner in (None, os.geteuid())
        required = None if on_mismatch == "accept" else asked
        arena = None if asked.n_writers == 1 and required else native.ANY_ARENA
        if on_mismatch not in ("recreate", "raise", "accept"):
            raise ValueError(f"on_mismatch must be 'recreate', 'raise' or 'accept', not {shown(on_mismatch)}")
        if not keep and not name.startswith(PREFIX):
            raise ValueError(f"the name of a store that is not kept must begin with {PREFIX!r}, not be {shown(name)}")
        end = time.monotonic() + seconds_of("wait", wait)
        while True:  # again if another process has changed meanwhile what the name names
            seen = orphans.look(chosen)
            try:
                made = cls._recover(
                    expected, serde, quotas, options=asked, required=required, arena=arena, keep_leases=keep_leases
                )
            except StoreNotFoundError as error:
                if error._code == native.CREATING or not owns:
                    if (left := end - time.monotonic()) <= 0:
                        if error._code == native.CREATING:
                            raise diagnostics.creating(chosen, wait) from None
                        hint = f"user {owner}, whom allow_uid names, creates it"
                        raise StoreNotFoundError(f"{error.message}{diagnostics.after(wait)}", hint=hint) from None
                    time.sleep(min(LOOK_AGAIN, left))
                    continue
                try:
                    return cls._create(chosen, asked, serde, limits, *access)
                except (StoreExistsError, StoreNotFoundError, WriterActiveError):
                    continue
            except (LayoutMismatchError, CorruptStoreError) as error:
                if not owns:
                    raise
                if required in (None, asked) or isinstance(error, CorruptStoreError):
                    required = orphans.make_room(chosen, seen, error, on_mismatch != "recreate", asked) or required
                else:  # it is no longer the old one, and may be as asked
                    required = asked
                continue
            if not keep:
                orphans.close_at_exit(made)
            return made

    def __repr__(self) -> str:
        return f"<ObjectStoreWriter {self._place!r}{'' if self._open else ' (closed)'}>"

    @property
    def handle(self) -> StoreHandle:
        """The handle with which readers attach; small and picklable."""
        return self._handle

    @property
    def name(self) -> str:
        """The store's POSIX name, without a slash."""
        return self._handle.name

    @property
    def index(self) -> int:
        """The number of its arena: 0 for the writer that created the store. NoArenaError for an owner without one."""
        if self._writer.arena == native.MAX_WRITERS:
            raise NoArenaError
        return self._writer.arena

    @property
    def n_writers(self) -> int:
        """How many arenas the store has."""
        return self._writer.n_writers

    @property
    def recovered(self) -> int:
        """How many objects came along when this writer took the store over; 0 after `create`."""
        return self._recovered

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of ranks of each group."""
        return self._writer.groups

    def register_host_memory(self) -> int:
        """Page-lock this writer's arena for CUDA, for asynchronous copies into what it begins; return its bytes.

        Idempotent. `close` unlocks the pages. Raises DeviceError without CUDA, or if the driver refuses.
        """
        if self._registered is None:
            data, _ = self._writer.data()
            self._registered = HostMemory(np.frombuffer(data, np.uint8).ctypes.data, len(data), data, writes=True)
        return self._registered.nbytes

    def close(self, unlink: bool | None = None) -> None:
        """Close the store; idempotent. What `create` made is removed with its last writer, what `open` had stays.

        If the last one closes with `unlink` True, the store is removed in any case, and with False it stays for `open`;
        an owner without an arena cannot have a store of a generated name stay.
        Readers keep what they have; views stay valid. Does nothing in a forked child.
        """
        if unlink is not None:
            check_flags(unlink=unlink)
        if self._open and not self._is_inherited():
            if self._registered is not None:
                self._registered.close()
            self._writer.close(native.AS_RECORDED if unlink is None else unlink)
            vars(self).pop("_claims", None)
            self._open = False
            _log.debug("closed store %s", self._place)

    @classmethod
    def unlink(cls, name: str, *, dir: Folder | None = None) -> None:
        """Remove a store that no process has open as a writer or owner; readers keep what they have.

        Raises StoreNotFoundError, WriterActiveError, ForeignStoreError if it is another user's, LayoutMismatchError if
        the file is not a store, and SharedMemoryError if the folder cannot be looked into.
        """
        orphans.unlink(place_of(checked_name(name), dir))
