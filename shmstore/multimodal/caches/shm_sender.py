"""P0 of `shm`: it puts each item once into shared memory and sends a reference; workers read it in place.

The store knows who still reads what, so it decides what stays. It also keeps the prompt updates, after their item
(`stored_updates`). So the next process that opens the store goes on with all of it.

Each call is a batch (`bindings.batch`); a single item is a batch of one. The call hands out what is cached, and the
leases then keep it. It stores the rest, and commits. If it fails or is interrupted before, the store undoes it: no
lease is open, and no new object is there. What was evicted to make room stays evicted, and what was replaced stays
removed.

A caller may give an item for a name under which another one is stored. The two are compared in the store, which takes
less time than the copy that it spares. If they differ, the name is the given one's from now on. An item and its prompt
updates are of one put, so an item whose updates are not known is put again as well.

Threads that store or delete take the lock `_storing`, also while bytes are copied: a key that one of them is storing
can be handed out to none of the others yet. Hits take no lock and never wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from shmstore.errors import (
    CacheMissError,
    NestingError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShmStoreError,
    StoreFullError,
    UnsupportedValueError,
    check_flags,
    shown,
)
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache, Begun
from shmstore.multimodal.caches.checks import (
    check_hash,
    check_known,
    check_pairs,
    checked_hashes,
    one_or_more,
)
from shmstore.multimodal.caches.counts import CacheInfo, HitCounter
from shmstore.multimodal.caches.shm_receiver import end_each
from shmstore.multimodal.caches.stored_updates import UNKNOWN, StoredUpdates
from shmstore.multimodal.config import MultiModalCacheConfig, checked_config
from shmstore.multimodal.values.sizes import named
from shmstore.multimodal.values.types import (
    MULTIMODAL,
    CacheTypes,
    ItemT,
    ProcessorInput,
    ProcessorOutput,
    ReceiverInput,
    UpdatesT,
)
from shmstore.refs import StoreHandle, trusted_ref
from shmstore.store import Claim, ObjectStoreWriter
from shmstore.store.arguments import MAX_KEY, int_of, packed_key, stored_key
from shmstore.store.batch import internals_of
from shmstore.store.kinds import number_of
from shmstore.store.writer import Batch, put_options
from shmstore.tiers import StoreTier

_log = logging.getLogger(__name__)
_NO_VALUE = (UnsupportedValueError, NestingError)
_LONG = MAX_KEY // 4
"""Characters above which a hash may be too long for a key."""
_NO_ROOM = (StoreFullError, ObjectTooLargeError)


class ShmObjectStoreSenderCache(BaseMultiModalProcessorCache[ItemT, UpdatesT]):
    """P0 of `shm`: output `(ObjectRef, updates)` with a new lease, hit or miss; or the input if it does not fit.

    Owns `writer` and closes it. Thread-safe. An item goes inline if the store has no room for it or never takes its
    size. Such items are counted in `inline_full` and `inline_too_large`, and a warning names the setting. If a tensor
    of an inline item is a view into a larger one, a copy is sent, because pickling the view would send the whole.

    An item that is given for a stored name is a hit if it is equal to the stored one. Else it replaces that one, here
    and in the tier. A hit without an item cannot be checked: the name is then trusted.

    With several API servers each has a sender, with its own writer of one store. An item of any of them is a hit in
    all, and comes with its prompt updates if these are stored with it.

    With a `tier`, which the sender owns, an item that another host has processed is fetched into the store when
    `is_cached_item` asks for it, and new items are published to the others. A tier that fails costs misses only.

    Raises ValueError for a configuration of another mode, and for a writer whose readers are not those of the
    configuration, since leases would wait for workers that never come. The writer is then still the caller's.
    """

    handle: StoreHandle
    writer: ObjectStoreWriter

    def __init__(
        self,
        config: MultiModalCacheConfig,
        writer: ObjectStoreWriter,
        *,
        types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL,
        hold: bool = False,
        tier: StoreTier | None = None,
    ) -> None:
        _check_fit(config, writer)
        self._reporting = threading.RLock()
        self.types = types
        self._item_type = types.item_type
        check_flags(hold=hold)
        self._pid = os.getpid()
        self._hold = hold
        self.tier = tier
        self.writer = writer
        self.handle = writer.handle
        self._inside = internals_of(writer)
        self._native = self._inside.native
        self._storing = self._native.storing
        self._updates = StoredUpdates(types, writer)
        self._counts = HitCounter()
        self._claims: WeakValueDictionary[str, Claim] = WeakValueDictionary()
        """By hash: what threads have begun, and each of them keeps."""

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether None is enough as input; changes neither order nor counts. StoreClosedError after `close`.

        Asks the tier, if there is one, for an item that the store does not have, and waits for it.
        """
        if type(mm_hash) is not str or not mm_hash or not mm_hash.isascii():
            check_hash(mm_hash)
        if len(mm_hash) > _LONG:
            mm_hash = stored_key(mm_hash)
        if self._updates.is_cached(mm_hash):
            return True
        if self.tier is None or not self.types.shares(mm_hash):
            return False

        def accepts(extra: bytes) -> bool:  # else its hit would be a miss, again and again
            return self._updates.unpacked(extra, mm_hash) is not UNKNOWN

        return self.tier.fetch(mm_hash, accepts=accepts) and self._updates.is_cached(mm_hash)

    def begin(self, mm_hashes: Sequence[str], *, wait: float = 1.0) -> Begun:
        """Do `is_cached`, and claim the rest: one thread of all API servers makes each item, and the others wait.

        What goes inline, or is stored without its updates, is made by one after the other.
        """
        hashes = [stored_key(mm_hash) for mm_hash in checked_hashes(mm_hashes)]
        begun = super().begin(hashes, wait=wait)
        if all(begun):
            return begun
        end = time.monotonic() + wait
        answers = dict(zip(hashes, begun, strict=True))
        # All in one order, so that who meets the same items waits at the first; what others make comes before a claim.
        missing = sorted((not self.writer.claimed(key), key) for key, cached in answers.items() if not cached)
        for _, key in missing:
            has = lambda packed, key=key: self._updates.is_cached(key)  # noqa: E731
            found = self._inside.look_or_claim(key, packed_key(key), has, end - time.monotonic())
            if isinstance(found, Claim):  # its answer is False already
                begun.claims.append(found)
                self._claims[key] = found
            else:
                answers[key] = found or None
        begun[:] = [answers[key] for key in hashes]
        return begun

    def get_and_update_item(
        self, mm_item: ProcessorInput[ItemT, UpdatesT], mm_hash: str
    ) -> ProcessorOutput[ItemT, UpdatesT]:
        """Return a reference with a lease of its own, or the item if it does not fit, and the prompt updates.

        Raises CacheMissError for None if nothing is cached, and TypeError for a wrong input or hash or an item that
        cannot be stored. An error or an interrupt leaves no lease, item or count of this call.
        """
        if type(mm_hash) is not str or not mm_hash or not mm_hash.isascii():
            check_hash(mm_hash)
        if mm_item is not None and not (  # the common case without a call; a miss sees its updates when it sizes them
            type(mm_item) is tuple
            and len(mm_item) == 2
            and type(mm_item[0]) is self._item_type
            and type(mm_item[1]) is list
        ):
            self.types.check_input(mm_item, mm_hash)
        if len(mm_hash) > _LONG:
            mm_hash = stored_key(mm_hash)
        if mm_item is None:
            return self._one_hit(mm_hash)
        return self._exchange((mm_item,), (mm_hash,))[0]

    def get_and_update(
        self, mm_items: Sequence[ProcessorInput[ItemT, UpdatesT]], mm_hashes: Sequence[str]
    ) -> list[ProcessorOutput[ItemT, UpdatesT]]:
        """Do `get_and_update_item` for each, all or nothing; what is cached stays until the batch is done."""
        check_pairs(mm_items, mm_hashes, self.types.check_input)
        return self._exchange(mm_items, [stored_key(mm_hash) for mm_hash in mm_hashes])

    def _one_hit(self, mm_hash: str) -> ProcessorOutput[ItemT, UpdatesT]:
        """Do `_exchange` for one item that has no input, the usual call, in three quarters of the time."""
        native, counts = self._native, self._counts
        batch = native.batch()
        try:
            output = self._hit(batch, mm_hash)
            if output is None or output[1] is UNKNOWN:
                raise CacheMissError([mm_hash])
            now = counts.counts  # the commit, as below
            counts.counts = now[0] + 1, now[1] + 1, now[2], now[3]
            batch.record.keep = 1
            native.spare = batch if native._w else None
            return output
        except BaseException:
            batch.undo()
            raise

    def _exchange(
        self, mm_items: Sequence[ProcessorInput[ItemT, UpdatesT]], mm_hashes: Sequence[str]
    ) -> list[ProcessorOutput[ItemT, UpdatesT]]:
        """Do `get_and_update`; the hashes are checked, and as the store has them."""
        native, counts = self._native, self._counts
        outputs: list[Any] = []
        missed: list[type[ShmStoreError] | None] = []
        stored: list[str] = []
        total = len(mm_hashes)
        misses = full = large = late = 0
        batch = native.batch()
        try:
            if total > 1 and None in mm_items:
                check_known(mm_items, mm_hashes, self._updates.is_cached)  # before anything changes
            # What is cached comes first: its leases keep it while the rest is stored.
            absent: set[str] = set()  # a repetition is one miss
            for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
                output = None if mm_hash in absent else self._hit(batch, mm_hash)
                if output is not None:
                    output = self._checked(output, mm_hash, mm_item)
                if output is None:
                    absent.add(mm_hash)
                outputs.append(output)
            if None in outputs:
                given: dict[str, Any] = {}
                for mm_hash, mm_item in zip(mm_hashes, mm_items, strict=True):
                    if mm_item is not None:
                        given.setdefault(mm_hash, mm_item)
                if not absent <= given.keys():  # evicted since it was looked for, or without a lease entry
                    raise CacheMissError(dict.fromkeys(h for h in mm_hashes if h in absent and h not in given))
                if self.tier is not None:
                    for mm_hash in given:
                        self.tier.wait(mm_hash)
                with self._storing:
                    for at, mm_hash in enumerate(mm_hashes):
                        if (mm_item := mm_items[at]) is not None:
                            given[mm_hash] = mm_item  # from here on None stands for this one
                        elif outputs[at] is None and (found := self._hit(batch, mm_hash)) is not None:
                            outputs[at] = self._checked(found, mm_hash, None)
                        if outputs[at] is None:
                            outputs[at] = self._put(batch, given[mm_hash], mm_hash, missed, stored)
                    if self.tier is not None:  # here: what is stored before a clear is published before it
                        for mm_hash in stored:  # if this batch is undone, what the tier has is no less right
                            self.tier.publish(mm_hash)
                misses = len(missed)
                full, large = missed.count(StoreFullError), missed.count(ObjectTooLargeError)
                late = missed.count(ObjectNotFoundError)
            # The commit: without a call, so that nothing comes in between.
            now = counts.counts
            counts.counts = now[0] + total - misses, now[1] + total, now[2], now[3]
            if full or large or late:
                self.inline_full += full
                self.inline_too_large += large
                self.inline_late += late
            batch.record.keep = 1
            native.spare = batch if native._w else None  # closed meanwhile: a spare would keep the mapping
            return outputs
        except BaseException:
            batch.undo()
            raise
        finally:
            if self._claims:
                for mm_hash in mm_hashes:
                    if (claim := self._claims.pop(mm_hash, None)) is not None:
                        claim.end()

    def _hit(self, batch: Batch, mm_hash: str) -> ProcessorOutput[ItemT, UpdatesT] | None:
        """Hand out a stored item with its updates, or UNKNOWN; None if it is not there, or no lease entry is free."""
        try:
            packed = batch.hit(mm_hash.encode(), self._hold)  # the hash was checked, and fits
        except StoreFullError:
            return None
        if packed is None:
            return None
        ref = trusted_ref(packed)
        return ref, self._updates.of(ref, mm_hash)

    def _checked(
        self, found: ProcessorOutput[ItemT, UpdatesT], mm_hash: str, mm_item: ProcessorInput[ItemT, UpdatesT]
    ) -> ProcessorOutput[ItemT, UpdatesT] | None:
        """Return what `_hit` has found if it is the given item, and its updates are known; else end its lease.

        One that differs is removed: its name is the given one's from now on.
        """
        ref: Any = found[0]
        same = True
        if mm_item is not None:
            self.types.check_input(mm_item, mm_hash)
            try:
                same = self._inside.equals(ref, mm_item[0])
            except _NO_VALUE as error:
                raise named(error, f"item of {shown(mm_hash)}") from None
        if same and found[1] is not UNKNOWN:
            return found
        self.writer.cancel(ref)
        if not same:
            self.invalidate(mm_hash)
        return None

    def _put(
        self,
        batch: Batch,
        mm_item: tuple[ItemT, UpdatesT],
        mm_hash: str,
        missed: list[type[ShmStoreError] | None],
        stored: list[str],
    ) -> ProcessorOutput[ItemT, UpdatesT]:
        """Store the item, or hand it out if it is stored already, or send it inline if it does not fit.

        What is stored under its hash is removed if it is another item, or if its updates are unknown. `missed` gets an
        entry for an item that was not cached: the error, if it goes inline. `stored` gets the hash of one that was
        stored with its updates.
        """
        item, updates = mm_item
        inside, packed = self._inside, mm_hash.encode()
        kept, extra = self._updates.written(mm_item, mm_hash)
        options = put_options(self._kind_of(item, updates), 0, self._hold)
        try:
            encoded = inside.serde.encode(item)
            try:
                ref = inside.put(batch, packed, encoded, options, extra)
            except ObjectExistsError:  # a repetition, of another thread perhaps; or its updates are unknown
                there = inside.hand_out(batch, mm_hash, self._hold)
                output = self._checked((there, self._updates.of(there, mm_hash)), mm_hash, mm_item)
                if output is not None:
                    return output
                self.invalidate(mm_hash)
                ref = inside.put(batch, packed, encoded, options, extra)
        except _NO_VALUE as error:
            raise named(error, f"item of {shown(mm_hash)}") from None
        except _NO_ROOM as error:
            missed.append(type(error))  # not the error, whose traceback would keep this frame, and all below it
            so_far = self.inline_full if isinstance(error, StoreFullError) else self.inline_too_large
            count = so_far + missed.count(type(error))
            if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: who holds what takes 75 ns for each object
                _warn(count, inside.explain(batch, error, packed, encoded, options, extra))
            return self.types.alone(mm_item)
        except (ObjectNotFoundError, ObjectExistsError):  # a tier may still write an object of this key
            missed.append(ObjectNotFoundError)
            return self.types.alone(mm_item)
        missed.append(None)
        if extra:
            self._updates.keep_decoded(ref, kept)
            if self.types.shares(mm_hash):  # else another host could not use it
                stored.append(mm_hash)
        else:  # another host could not use it
            self._updates.keep_beside(ref, mm_hash, kept)
        return ref, updates

    def _kind_of(self, item: ItemT, updates: UpdatesT) -> int:
        """Return the number of the modality; 0 if it cannot name a kind or is one too many, which refuses nothing."""
        kind = self.types.modality(item, updates)
        try:
            return number_of(self._native, kind)
        except (TypeError, ValueError):
            return 0

    def release(self, refs: Iterable[ReceiverInput[ItemT]]) -> int:
        """End the leases of a request that ended before its workers read it; return how many were open.

        Raises StaleRefError for a reference that this sender never gave, after the others.
        """
        return end_each(self.writer.cancel, self.types.checked_sent(refs))

    def assign_group(self, sent: Iterable[ReceiverInput[ItemT]], engine: int) -> int:
        """Let the leases of what goes to one engine core wait for its workers only; return how many are still open.

        Again with the same core does nothing. Raises ValueError if there is no such core, or if one of the leases waits
        for another one already.
        """
        engine = int_of("engine (below data_parallel_size)", engine, 0, len(self.writer.groups) - 1)
        return end_each(lambda ref: self.writer.assign_group(ref, engine), self.types.checked_sent(sent))

    def invalidate(self, mm_hashes: str | Iterable[str]) -> None:
        """Store these items again at their next input, because a worker has raised `CacheMissError` for them.

        Also if another API server has stored them. This server takes them from a tier no more, which removes them once
        it answers.
        """
        hashes = [stored_key(mm_hash) for mm_hash in one_or_more(mm_hashes)]
        with self._storing:
            if self.tier is not None:
                self.tier.remove(hashes)
            for mm_hash in hashes:
                self.writer.delete(mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; ignore an absent one."""
        check_hash(mm_hash)
        self.writer.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, also of other API servers, prompt updates and counts; what is being read stays until then.

        What a tier has so far is used by no API server of this host any more, and stays there for other hosts.
        `tier_namespace` is for changes of a processor or a model.
        """
        with self._storing:
            if self.tier is not None:
                self.tier.clear()
            self.writer.clear()
            self._counts.clear()
            self.inline_full = self.inline_too_large = self.inline_late = 0

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self._reporting:
            return self._counts.stat(delta)

    def close(self, unlink: bool | None = None) -> None:
        """Close the tier, which has a few seconds for what is still to be sent, and then the store; idempotent.

        A store with a `shm_name` stays for the next process, and `unlink` is as in `ObjectStoreWriter.close`. Workers
        go on reading. A call of another thread that is storing at the time raises StoreClosedError.
        """
        if unlink is not None:
            check_flags(unlink=unlink)  # before the tier is closed
        try:
            if self.tier is not None and self._pid == os.getpid():
                self.tier.close()
        finally:
            self.writer.close(unlink)


def _warn(count: int, error: ShmStoreError) -> None:
    setting = "shm_max_object_size_mb, at most ipc_cache_gb"
    if isinstance(error, StoreFullError):
        setting = "shm_max_objects" if error.resource in ("slots", "leases") else "ipc_cache_gb"
    # Text alone: a handler that keeps the record would keep the error's frames, and the items in them.
    _log.warning("item sent inline (%d so far): %s (the limit is %s)", count, error.message, setting)


def _check_fit(config: MultiModalCacheConfig, writer: ObjectStoreWriter) -> None:
    if checked_config(config).cache_type != "shm":
        raise ValueError(f"config: expected one of cache_type='shm', got cache_type={shown(config.cache_type)}")
    if writer.groups != (config.world_size,) * config.n_engines:
        raise ValueError(
            f"writer: {writer!r} has groups of {list(writer.groups)} ranks, and config has {config.n_engines} engine "
            f"cores of {config.world_size} workers (hint: create a new store with these groups)"
        )
