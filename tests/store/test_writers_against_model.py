"""Three writers and four ranks in two groups against a model of plain dicts, every invariant after every step.

The model knows what must be there: an object whose lease a rank still has to read, or that is pinned by a view. What
nobody holds may be evicted by its owner at any put, and the model then only forgets it.
"""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmstore import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    RankInUseError,
    StaleRefError,
    StoreFullError,
)
from shmstore.inspect.verify import verify
from tests.support import bits, random_tensor, store_name

WRITERS, RANKS, GROUPS = range(3), range(4), [3, 1]
MEMBERS = [{0, 1, 2}, {3}]
CAPACITY, MAX_OBJECTS = 8192, 8

KEYS = "abcd"
keys = st.sampled_from(KEYS)
writers = st.sampled_from(WRITERS)
ranks = st.sampled_from(RANKS)
groups = st.sampled_from([None, 0, 1])


@dataclass(eq=False)
class Object:
    key: str
    owner: int
    number: int
    content: bytes
    dropped: bool = False
    """A writer has deleted it, so that no writer hands it out any more."""


@dataclass(eq=False)
class Lease:
    ref: ObjectRef
    by: int
    object: Object
    expected: set[int]
    """Ranks that have still to read it."""
    group: int | None = None
    held: bool = False
    over: bool = False
    void: bool = False
    """Its writer is dead, and the object is another's."""

    @property
    def open(self) -> bool:
        return not self.over and not self.void and (self.held or bool(self.expected))


class WritersMachine(RuleBasedStateMachine):
    @initialize(eviction=st.sampled_from(["clock", "fifo"]))
    def start(self, eviction: Any) -> None:
        self.name = store_name()
        self.writers: list[ObjectStoreWriter | None] = [
            ObjectStoreWriter.create(
                self.name,
                capacity=CAPACITY,
                n_readers=len(RANKS),
                groups=GROUPS,
                n_writers=len(WRITERS),
                max_objects=MAX_OBJECTS,
                eviction=eviction,
            )
        ]
        self.writers += [ObjectStoreWriter.join(self.name) for _ in WRITERS[1:]]
        self.readers: list[ObjectStoreReader | None] = [ObjectStoreReader.attach(self.name, rank) for rank in RANKS]
        self.views: list[list[tuple[Object, Any]]] = [[] for _ in RANKS]
        self.objects: list[dict[str, Object]] = [{} for _ in WRITERS]
        """What each writer has stored and not deleted, as far as the model knows; evicted ones among them."""
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        for reader in getattr(self, "readers", []):
            if reader is not None:
                reader.close()
        if not hasattr(self, "writers"):
            return
        for views in self.views:
            views.clear()
        for index, writer in enumerate(self.writers):
            if writer is None:
                self.writers[index] = ObjectStoreWriter.join(self.name, index)
        for writer in self.writers:
            assert writer is not None
            writer.cancel_all()
        for writer in self.writers:
            assert writer is not None
            writer.clear()
        for writer in self.writers:  # nothing is left that keeps a byte
            assert writer is not None
            assert (0, 0) == (len(writer), writer.stats().used_bytes)
            writer.close()

    # ---- the model

    def present(self, rank: int) -> bool:
        return self.readers[rank] is not None

    def kept(self, thing: Object) -> bool:
        """Whether the object must still be there."""
        held = any(lease.open and lease.object is thing for lease in self.leases)
        return held or any(thing is other for views in self.views for other, _ in views)

    def found(self, key: str) -> list[Object]:
        """Return the objects that the writer may hand out under this key."""
        return [thing for owned in self.objects for thing in owned.values() if thing.key == key and not thing.dropped]

    def opened(self, by: int, ref: ObjectRef, thing: Object, group: int | None, held: bool) -> None:
        members = set(RANKS) if group is None else MEMBERS[group]
        here = {rank for rank in members if self.present(rank)}
        self.leases.append(Lease(ref, by, thing, here, group, held))

    # ---- the writers

    def writer(self, index: int) -> ObjectStoreWriter | None:
        """Return the writer, after its next call, in which it deletes what others have dropped."""
        writer = self.writers[index]
        if writer is None:
            return None
        writer.check_valid()
        for key, thing in list(self.objects[index].items()):
            if thing.dropped:
                del self.objects[index][key]
        return writer

    @rule(
        by=writers,
        key=keys,
        size=st.sampled_from([100, 900, 2500]),
        seed=st.integers(0, 10**6),
        group=groups,
        sent=st.booleans(),
    )
    def put(self, by: int, key: str, size: int, seed: int, group: int | None, sent: bool) -> None:
        if (writer := self.writer(by)) is None:
            return
        before = set(writer.keys())
        value = random_tensor(seed, size)
        try:
            ref = writer.put(key, value, group=group)
        except ObjectExistsError:
            assert key in before
            assert key in self.objects[by]
            return
        except StoreFullError:
            assert any(self.kept(thing) for thing in self.all_of(by)), "nothing is held"
            return
        assert key not in before
        self.objects[by][key] = thing = Object(key, by, ref.monotonic_id, bits(value))
        self.opened(by, ref, thing, group, held=False)
        if not sent:
            writer.cancel(ref)
            self.leases[-1].over = True

    @rule(by=writers, seed=st.integers(0, 10**6))
    def turn_over(self, by: int, seed: int) -> None:
        """Put objects that nobody waits for: what nobody holds goes."""
        if (writer := self.writer(by)) is None:
            return
        for number in range(8):
            try:
                writer.cancel(writer.put(f"turn-{number}", random_tensor(seed + number, 1500)))
            except StoreFullError:
                assert any(self.kept(thing) for thing in self.all_of(by)), "nothing is held"
        for number in range(8):
            writer.delete(f"turn-{number}")

    def all_of(self, by: int) -> list[Object]:
        """Return every object of a writer that something may hold, deleted ones too."""
        held = [lease.object for lease in self.leases] + [thing for views in self.views for thing, _ in views]
        return [thing for thing in {*held, *self.objects[by].values()} if thing.owner == by]

    @rule(by=writers, key=keys, group=groups, held=st.booleans())
    def get_cached(self, by: int, key: str, group: int | None, held: bool) -> None:
        if (writer := self.writer(by)) is None:
            return
        maybe = self.found(key)
        assert writer.is_cached(key) or not any(self.kept(thing) for thing in maybe)
        try:
            ref = writer.get_cached(key, group=group, hold=held)
        except ObjectNotFoundError:
            assert not any(self.kept(thing) for thing in maybe)
            return
        except StoreFullError:
            assert sum(lease.open and lease.by == by for lease in self.leases) >= MAX_OBJECTS
            return
        (thing,) = [thing for thing in maybe if thing.number == ref.monotonic_id]
        if key in writer.keys():
            assert thing.owner == by, "one's own comes first"
        self.opened(by, ref, thing, group, held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), group=st.sampled_from([0, 1]))
    def assign_group(self, data: st.DataObject, group: int) -> None:
        lease = data.draw(st.sampled_from(self.leases[-8:]))
        writer = self.writers[lease.by]
        if writer is None or lease.group not in (None, group) or not lease.open:
            return
        assert writer.assign_group(lease.ref, group)
        lease.group = group
        lease.expected &= MEMBERS[group]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-8:]))
        writer = self.writers[lease.by]
        if writer is None:
            return
        ended = writer.cancel(lease.ref)
        assert ended or not lease.open
        assert not (ended and lease.over)
        lease.over = True

    @rule(by=writers, key=keys)
    def delete(self, by: int, key: str) -> None:
        if (writer := self.writer(by)) is None:
            return
        maybe = self.found(key)
        deleted = writer.delete(key)
        assert deleted or not any(self.kept(thing) for thing in maybe)
        assert maybe or not deleted
        for thing in maybe:
            thing.dropped = True
        self.objects[by].pop(key, None)
        assert not writer.is_cached(key)

    @precondition(lambda self: sum(map(len, self.objects)) > len(KEYS))
    @rule(by=writers)
    def clear(self, by: int) -> None:
        if (writer := self.writer(by)) is None:
            return
        writer.clear()
        for owned in self.objects:
            for thing in owned.values():
                thing.dropped = True
        self.objects[by].clear()
        assert [] == [key for key in KEYS if writer.is_cached(key)]

    @rule(by=writers, rank=ranks)
    def retire(self, by: int, rank: int) -> None:
        writer = self.writers[by]
        if writer is None or self.present(rank):
            return  # of a rank that is here, only leases until now are over; the model has no need for that
        writer.retire(rank)

    @precondition(lambda self: sum(writer is not None for writer in self.writers) > 1)
    @rule(by=writers)
    def lose(self, by: int) -> None:
        """A writer dies: its arena stays, and nobody is promised what it has leased of others, until it comes back."""
        writer = self.writers[by]
        if writer is None:
            return
        writer.close(unlink=False)
        self.writers[by] = None
        for lease in self.leases:
            lease.void |= lease.by == by and lease.object.owner != by

    @precondition(lambda self: None in self.writers)
    @rule(keep=st.booleans())
    def rejoin(self, keep: bool) -> None:
        by = self.writers.index(None)
        writer = self.writers[by] = ObjectStoreWriter.join(self.name, by, keep_leases=keep)
        assert len(writer) == writer.recovered == len(writer.keys())
        for thing in self.objects[by].values():  # it has forgotten what it did not hand out
            assert thing.key in writer.keys() or thing.dropped or not self.kept(thing)
        for owned in self.objects:
            for thing in owned.values():
                if thing.owner == by and thing.dropped:
                    assert thing.key not in writer.keys()
        for lease in self.leases:
            if lease.by == by:
                lease.over |= not keep or (lease.void and not writer.validate(lease.ref))
                lease.void = False

    # ---- the readers

    @precondition(lambda self: None in self.readers)
    @rule()
    def attach(self) -> None:
        rank = self.readers.index(None)
        try:
            self.readers[rank] = ObjectStoreReader.attach(self.name, rank)
        except RankInUseError:
            assert self.views[rank]

    @precondition(lambda self: None not in self.readers)
    @rule(rank=ranks)
    def detach(self, rank: int) -> None:
        reader = self.readers[rank]
        if reader is None:
            return
        reader.close()
        self.readers[rank] = None
        for lease in self.leases:
            lease.expected.discard(rank)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=ranks, reads=st.booleans())
    def get(self, data: st.DataObject, rank: int, reads: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases[-8:]))
        reader = self.readers[rank]
        if reader is None:
            return
        promised = lease.open and rank in lease.expected
        if not reads:
            ended = reader.release(lease.ref)
            assert ended or not promised
        else:
            try:
                view = reader.get(lease.ref)
            except StaleRefError:
                assert not self.kept(lease.object)
                return
            assert lease.object.content == bits(view)
            self.views[rank].append((lease.object, view))
        lease.expected.discard(rank)

    @precondition(lambda self: any(self.views))
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        views = data.draw(st.sampled_from([views for views in self.views if views]))
        views.pop(data.draw(st.integers(0, len(views) - 1)))

    # ---- after every step

    @invariant()
    def no_view_has_changed(self) -> None:
        for views in getattr(self, "views", []):
            for thing, view in views:
                assert thing.content == bits(view)

    @invariant()
    def promised_references_can_be_read(self) -> None:
        for lease in getattr(self, "leases", []):
            if lease.open:
                for rank in lease.expected:
                    reader = self.readers[rank]
                    assert reader is not None
                    assert reader.validate(lease.ref), lease

    @invariant()
    def the_store_is_sound(self) -> None:
        if not hasattr(self, "writers"):
            return
        for index in WRITERS:
            writer = self.writer(index)
            if writer is not None:
                assert {key for key, thing in self.objects[index].items() if self.kept(thing)} <= set(writer.keys())
                assert set(writer.keys()) <= set(self.objects[index])
                open_now = sum(lease.open and lease.by == index for lease in self.leases)
                assert open_now <= writer.stats().open_leases
        report = verify(self.name)
        assert report.ok, report


WritersMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestWritersAgainstAModel = WritersMachine.TestCase
