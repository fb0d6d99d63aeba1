"""Writers, and ranks in two groups, against a model of plain dicts: every invariant after every step.

The model knows what is held, and a put that is refused must be justified by that. A writer closes leases and reclaims
deleted objects only when it needs room: until then the store may have more of both than the model. A writer learns at
its next call what another has deleted.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmstore import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    ObjectTooLargeError,
    RankInUseError,
    StaleRefError,
    StoreFullError,
    TensorSpec,
)
from shmstore.inspect.verify import verify
from tests.support import frozen, length_of, random_tensor, span_of, store_name

MAX_OBJECT_SIZE = 7000
WRITERS, RANKS = range(3), range(4)
SHAPES = [(1, [2, 1], 16384, 12), (3, [3, 1], 8192, 8)]
"""Writers, groups, capacity and objects of each writer's arena."""

keys = st.sampled_from(["a", "b", "c", "d", "ключ", "k" * 300])
sizes = st.sampled_from([0, 100, 900, 2500, 5000, 6500, 8000])
seeds = st.integers(0, 10**6)
values = st.one_of(
    st.builds(random_tensor, seeds, sizes),
    st.builds(lambda seed, size: {"x": [random_tensor(seed, size), seed]}, seeds, sizes),
    st.builds(lambda seed: random_tensor(seed, 900).reshape(30, 30).T, seeds),
    st.one_of(st.none(), st.floats(allow_nan=False), st.text(), st.binary()),
)
writers = st.sampled_from(WRITERS)
ranks = st.sampled_from(RANKS)
groups = st.sampled_from([None, 0, 1])


@dataclass(eq=False)
class Object:
    key: str
    owner: int
    content: Any
    address: int
    span: int
    number: int
    kind: str | None
    dropped: bool = False
    """Another writer has deleted it, and its owner has not heard of that."""
    deleted: bool = False
    gone: bool = False
    protections: int = 0


@dataclass(eq=False)
class Lease:
    ref: ObjectRef
    by: int
    object: Object
    expected: set[int]
    """Ranks that have still to read it."""
    group: int | None
    held: bool
    acknowledged: set[int] = field(default_factory=set)
    over: bool = False
    void: bool = False
    """Its writer has gone, and the object is another's."""

    @property
    def open(self) -> bool:
        return not self.over and not self.void and (self.held or bool(self.expected))


@dataclass(eq=False)
class Rank:
    reader: ObjectStoreReader | None = None
    """None while nobody is attached; its views may outlive it."""
    attached: bool = False
    """Ever."""
    retired: set[int] = field(default_factory=set)
    """The writers that have retired it since it was attached."""
    views: list[tuple[Object, Any]] = field(default_factory=list)

    def expected(self, by: int) -> bool:
        """By a lease that this writer opens now."""
        return (self.reader is not None or not self.attached) and by not in self.retired


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        shape=st.sampled_from(SHAPES),
        present=st.sampled_from([{0, 1, 2, 3}, {0, 1}, {2}]),
    )
    def start(self, shape: tuple[int, list[int], int, int], present: set[int]) -> None:
        n_writers, self.groups, self.capacity, self.max_objects = shape
        self.name = store_name()
        self.writers: list[ObjectStoreWriter | None] = [
            ObjectStoreWriter.create(
                self.name,
                capacity=self.capacity,
                n_readers=sum(self.groups),
                groups=self.groups,
                n_writers=n_writers,
                max_object_size=MAX_OBJECT_SIZE,
                max_objects=self.max_objects,
            )
        ]
        self.writers += [ObjectStoreWriter.join(self.name) for _ in range(n_writers - 1)]
        self.ranks = [Rank() for _ in range(sum(self.groups))]
        self.live: list[dict[str, Object]] = [{} for _ in self.writers]
        self.deleted: list[Object] = []
        self.leases: list[Lease] = []
        self.blocks: list[tuple[int, ExitStack, set[str], list[Object]]] = []
        self.lost: set[str] = set()  # keys in blocks of closed writers: a successor keeps the lease on another's object
        for number in present:
            self.attach(number)

    def teardown(self) -> None:
        if not hasattr(self, "writers"):
            return
        for _, stack, _, _ in self.blocks:
            stack.close()
        for rank in self.ranks:
            if rank.reader is not None:
                rank.reader.close()
                rank.reader = None
        self.no_view_has_changed_and_what_is_promised_can_be_read()  # views outlive their readers
        for rank in self.ranks:
            rank.views.clear()
        everyone = [writer or ObjectStoreWriter.join(self.name, by) for by, writer in enumerate(self.writers)]
        for writer in everyone:
            writer.cancel_all()
        for writer in everyone:
            writer.clear()
        for writer in everyone:
            assert (0, 0) == (len(writer), writer.stats().used_bytes), "something keeps a byte"
        for writer in everyone:
            writer.close()

    # ---- what the model knows

    def held(self, thing: Object) -> bool:
        return (
            thing.protections > 0
            or any(lease.open for lease in self.leases if lease.object is thing)
            or any(seen is thing for rank in self.ranks for seen, _ in rank.views)
        )

    def found(self, key: str) -> list[Object]:
        """Return the objects that a writer may hand out under this key."""
        return [owned[key] for owned in self.live if key in owned and not owned[key].dropped]

    def members(self, group: int | None) -> set[int]:
        first = 0 if group in (None, 0) else self.groups[0]
        return set(range(first, sum(self.groups) if group in (None, 1) else self.groups[0]))

    def opened(self, by: int, ref: ObjectRef, thing: Object, group: int | None, held: bool) -> None:
        expected = {number for number in self.members(group) if self.ranks[number].expected(by)}
        self.leases.append(Lease(ref, by, thing, expected, group, held))

    def open_leases(self, by: int) -> int:
        return sum(lease.open and lease.by == by for lease in self.leases)

    def some_leases(self) -> list[Lease]:
        """Return mostly leases that mean something still, and a few that do not."""
        return [lease for lease in self.leases if not lease.object.gone][-20:] + self.leases[-4:] + self.leases[:2]

    def writer(self, by: int) -> ObjectStoreWriter | None:
        """Return the writer, if it is there, after a call in which it deletes what others have dropped."""
        writer = self.writers[by]
        if writer is not None:
            writer.check_valid()
            for key in [key for key, thing in self.live[by].items() if thing.dropped]:
                self.mark_deleted(by, key)
        return writer

    def mark_deleted(self, by: int, key: str) -> None:
        thing = self.live[by].pop(key)
        thing.deleted = True
        if self.held(thing) or key in self.lost.union(*(names for _, _, names, _ in self.blocks)):
            self.deleted.append(thing)  # leased by another's block, perhaps
        else:
            thing.gone = True

    def evicted(self, by: int, writer: ObjectStoreWriter) -> int:
        """Book what has left since the last look; return its number."""
        left = set(writer.keys())
        names = [key for key in self.live[by] if key not in left]
        for key in names:
            self.gone(self.live[by].pop(key))
        return len(names)

    def gone(self, thing: Object) -> None:
        assert not self.held(thing), f"{thing.key} was reclaimed while somebody held it"
        thing.gone = True

    def figures(self, writer: ObjectStoreWriter) -> dict[str, Any]:
        """What a refusal leaves as it is: leases that are over may be closed by it, refusals are counted."""
        stats = writer.stats()
        changing = ("open_leases", "refusals", "kinds")
        return {name: getattr(stats, name) for name in stats.__slots__ if name not in changing}

    def check_refusal_is_justified(self, by: int, span: int) -> None:
        own = [thing for thing in [*self.live[by].values(), *self.deleted] if thing.owner == by]
        if len(self.writers) > 1:  # another writer returns its leases at its next call
            leased = {lease.object for lease in self.leases if lease.by != by and not lease.over}
            assert any(self.held(thing) or thing in leased or thing.key in self.lost for thing in own), (
                "nothing is held"
            )
            return
        ends = sorted((thing.address, thing.address + thing.span) for thing in own if self.held(thing))
        if len(ends) >= self.max_objects or self.open_leases(by) >= self.max_leases(by):
            return
        starts = [0, *(end for _, end in ends)]
        gaps = [at - start for start, at in zip(starts, [*(at for at, _ in ends), self.capacity], strict=True)]
        assert max(gaps) < span, f"refused {span} bytes where gaps of {gaps} could be had"

    def max_leases(self, by: int) -> int:
        writer = self.writers[by]
        assert writer is not None
        return writer.stats().max_leases

    # ---- the writers

    def store(
        self,
        by: int,
        key: str,
        value: Any,
        put: Callable[[ObjectStoreWriter], ObjectRef | None],
        group: int | None = None,
        held: bool = False,
        kind: str | None = None,
    ) -> None:
        """Store an object, and record it and what it evicted; take a reference if `put` returns none."""
        by %= len(self.writers)
        if (writer := self.writer(by)) is None:
            return
        before, names, figures = writer.stats(), writer.keys(), self.figures(writer)
        try:
            ref = put(writer)
        except ZeroDivisionError:
            self.evicted(by, writer)  # it had its room already
            return
        except ObjectExistsError:
            assert key in self.live[by]
        except ObjectTooLargeError:
            assert length_of(key, value) > MAX_OBJECT_SIZE
        except StoreFullError:
            assert key not in self.live[by]
            self.check_refusal_is_justified(by, span_of(key, value))
            assert before.refusals + 1 == writer.stats().refusals
        else:
            assert key not in self.live[by]
            assert length_of(key, value) <= MAX_OBJECT_SIZE
            self.stored(by, key, value, before, ref, group, held, kind)
            return
        assert (names, figures) == (writer.keys(), self.figures(writer))

    def stored(
        self, by: int, key: str, value: Any, before: Any, ref: ObjectRef | None, group: Any, held: bool, kind: Any
    ) -> None:
        writer = self.writers[by]
        assert writer is not None
        assert self.evicted(by, writer) == writer.stats().evictions - before.evictions
        if ref is None:
            try:
                ref = writer.get_cached(key)
            except StoreFullError:
                assert self.open_leases(by) + len(self.lost) >= self.max_leases(by)
                assert writer.delete(key)
                for other in self.found(key):
                    other.dropped = True
                return
        thing = Object(key, by, frozen(value), ref.address, span_of(key, value), ref.monotonic_id, kind)
        assert before.next_id == ref.monotonic_id
        for other in [*self.live[by].values(), *self.deleted]:
            if thing.address < other.address + other.span and other.address < thing.address + thing.span:
                assert other.deleted, f"{key} was laid over {other.key}"
                self.gone(other)
        self.deleted = [other for other in self.deleted if not other.gone]
        self.live[by][key] = thing
        for owner, _, names, kept in self.blocks:
            if owner == by and key in names:
                kept.append(thing)
                thing.protections += 1
        self.opened(by, ref, thing, group, held)

    @rule(
        by=writers,
        key=keys,
        value=values,
        group=groups,
        held=st.booleans(),
        kind=st.sampled_from([None, "image", "audio"]),
        sent=st.sampled_from([True, True, True, False]),
    )
    def put(self, by: int, key: str, value: Any, group: Any, held: bool, kind: Any, sent: bool) -> None:
        count = len(self.leases)
        self.store(
            by, key, value, lambda writer: writer.put(key, value, group=group, hold=held, kind=kind), group, held, kind
        )
        if not sent and len(self.leases) > count:
            self.cancel_lease(self.leases[-1])

    @rule(by=writers, key=keys, size=sizes.filter(lambda size: size < 8000), seed=seeds, commit=st.booleans())
    def reserve(self, by: int, key: str, size: int, seed: int, commit: bool) -> None:
        value = {"x": random_tensor(seed, size), "n": seed}

        def fill(writer: ObjectStoreWriter) -> None:
            with writer.reserve(key, {"x": TensorSpec((size,), torch.uint8), "n": seed}) as views:
                assert key not in writer.keys()
                with pytest.raises(ObjectExistsError):
                    writer.put(key, 1)
                views["x"].copy_(value["x"])
                if not commit:
                    raise ZeroDivisionError

        self.store(by, key, value, fill)

    @rule(by=writers, seed=seeds, count=st.integers(1, 8), size=st.sampled_from([900, 2500, 4000]), sent=st.booleans())
    def turn_over(self, by: int, seed: int, count: int, size: int, sent: bool) -> None:
        """Put objects that nobody waits for, and the hand goes round; or fill the store with what is sent."""
        for number in range(count):
            self.put(by, f"turn-{seed}-{number}", random_tensor(seed + number, size), None, False, None, sent)

    @rule(by=writers, key=keys, group=groups, held=st.booleans())
    def get_cached(self, by: int, key: str, group: int | None, held: bool) -> None:
        by %= len(self.writers)
        if (writer := self.writer(by)) is None:
            return
        maybe = self.found(key)
        assert bool(maybe) == writer.is_cached(key)
        assert writer.touch(key) == bool(maybe)
        try:
            ref = writer.get_cached(key, group=group, hold=held)
        except ObjectNotFoundError:
            assert not maybe
        except StoreFullError:
            assert self.open_leases(by) + len(self.lost) >= self.max_leases(by)
        else:
            (thing,) = [thing for thing in maybe if (thing.number, thing.address) == (ref.monotonic_id, ref.address)]
            assert thing.owner == by or key not in self.live[by], "one's own comes first"
            self.opened(by, ref, thing, group, held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), group=st.sampled_from([0, 1]))
    def assign_group(self, data: st.DataObject, group: int) -> None:
        lease = data.draw(st.sampled_from(self.some_leases()))
        writer = self.writers[lease.by]
        if writer is None or lease.group not in (None, group) or not lease.open:
            return
        assert writer.assign_group(lease.ref, group)
        lease.group = group
        lease.expected &= self.members(group)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_lease(data.draw(st.sampled_from(self.some_leases())))

    def cancel_lease(self, lease: Lease) -> None:
        if (writer := self.writers[lease.by]) is None:
            return
        ended = writer.cancel(lease.ref)
        assert ended or not lease.open
        assert not ended or not (lease.over or lease.object.gone)
        lease.expected.clear()
        lease.over = True

    @rule(by=writers, key=keys)
    def delete(self, by: int, key: str) -> None:
        by %= len(self.writers)
        if (writer := self.writer(by)) is None:
            return
        maybe = self.found(key)
        assert writer.delete(key) == bool(maybe)
        for thing in maybe:
            thing.dropped = True
        assert self.writer(by)
        assert not writer.is_cached(key)

    @precondition(lambda self: sum(map(len, self.live)) >= 5)
    @rule(by=writers)
    def clear(self, by: int) -> None:
        by %= len(self.writers)
        if (writer := self.writer(by)) is None:
            return
        before = writer.stats().next_id
        writer.clear()
        for thing in [thing for owned in self.live for thing in owned.values()]:
            thing.dropped = True
        assert self.writer(by)
        assert before == writer.stats().next_id

    @precondition(lambda self: not any(rank.retired for rank in self.ranks))
    @rule(by=writers, number=ranks)
    def retire(self, by: int, number: int) -> None:
        by, number = by % len(self.writers), number % len(self.ranks)
        if (writer := self.writer(by)) is None:
            return
        writer.retire(number)
        self.ranks[number].retired.add(by)
        for lease in self.leases:
            if lease.by == by:
                lease.expected.discard(number)

    @rule(by=writers, names=st.sets(keys, max_size=4))
    def protect(self, by: int, names: set[str]) -> None:
        by %= len(self.writers)
        if (writer := self.writer(by)) is None:
            return
        stack = ExitStack()
        try:
            stack.enter_context(writer.protect(names))
        except StoreFullError:
            assert len(self.writers) > 1, "one's own takes no lease"
            return
        kept = [self.live[by][key] for key in names if key in self.live[by]]
        for thing in kept:
            thing.protections += 1
        self.blocks.append((by, stack, names, kept))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def leave_block(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.blocks)))

    def leave(self, block: tuple[int, ExitStack, set[str], list[Object]]) -> None:
        self.blocks.remove(block)
        block[1].close()
        for thing in block[3]:
            thing.protections -= 1

    @precondition(lambda self: len(self.writers) == 1)
    @rule(by_handle=st.booleans())
    def recover(self, by_handle: bool) -> None:
        (writer,) = self.writers
        assert writer is not None
        handle, names, before = writer.handle, writer.keys(), writer.stats()
        writer.close(unlink=False)
        writer = ObjectStoreWriter.recover(handle if by_handle else self.name)
        self.writers = [writer]
        assert (names, handle, before) == (writer.keys(), writer.handle, writer.stats())
        for block in list(self.blocks):
            self.leave(block)

    @precondition(lambda self: sum(writer is not None for writer in self.writers) > 1)
    @rule(by=writers)
    def lose(self, by: int) -> None:
        """Close a writer: its arena stays, and its leases on other writers' objects are void until it joins again."""
        writer = self.writers[by]
        if writer is None:
            return
        writer.close(unlink=False)
        self.writers[by] = None
        for lease in self.leases:
            lease.void |= lease.by == by and lease.object.owner != by
        for block in [block for block in self.blocks if block[0] == by]:
            self.leave(block)
            self.lost |= block[2]

    @precondition(lambda self: None in self.writers)
    @rule(keep=st.booleans())
    def rejoin(self, keep: bool) -> None:
        by = self.writers.index(None)
        writer = self.writers[by] = ObjectStoreWriter.join(self.name, by, keep_leases=keep)
        for lease in self.leases:
            if lease.by == by:
                lease.over |= not keep or (lease.void and not writer.validate(lease.ref))
                lease.void = False
        self.writer(by)
        assert len(writer) == writer.recovered == len(self.live[by])

    # ---- the readers

    @rule(number=ranks)
    def attach(self, number: int) -> None:
        number %= len(self.ranks)
        rank = self.ranks[number]
        try:
            reader = ObjectStoreReader.attach(self.name, number)
        except RankInUseError:
            assert rank.reader is not None or rank.views
            return
        assert rank.reader is None
        assert not rank.views
        rank.reader, rank.attached, rank.retired = reader, True, set()

    @rule(number=ranks, properly=st.booleans())
    def detach(self, number: int, properly: bool) -> None:
        """Close a reader, or lose it: what it was promised is over at once, its views hold by their pins alone."""
        if (rank := self.ranks[number % len(self.ranks)]).reader is None:
            return
        if properly:
            rank.reader.close()
            rank.reader = None
        else:
            with pytest.warns(ResourceWarning, match="was not closed"):
                rank.reader = None
        for lease in self.leases:
            lease.expected.discard(number % len(self.ranks))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), number=ranks, how=st.sampled_from(["view", "copy", "release"]))
    def get(self, data: st.DataObject, number: int, how: str) -> None:
        number %= len(self.ranks)
        rank, lease = self.ranks[number], data.draw(st.sampled_from(self.some_leases()))
        if (reader := rank.reader) is None:
            return
        thing, promised = lease.object, lease.open and number in lease.expected
        there = reader.validate(lease.ref)
        if thing.gone:
            assert not there
        elif self.held(thing) or not (thing.deleted or thing.dropped):
            assert there
        if how == "release":
            ended = reader.release(lease.ref)
            assert ended or not promised
            assert not ended or not (number in lease.acknowledged or lease.over or thing.gone)
        elif there:
            value = reader.get(lease.ref, copy=how == "copy")
            assert thing.content == frozen(value)
            if how == "view" and has_bytes(value):
                rank.views.append((thing, value))
        else:
            with pytest.raises(StaleRefError):
                reader.get(lease.ref)
            return
        lease.expected.discard(number)
        lease.acknowledged.add(number)

    @precondition(lambda self: any(rank.views for rank in self.ranks))
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        views = data.draw(st.sampled_from([rank.views for rank in self.ranks if rank.views]))
        views.pop(data.draw(st.integers(0, len(views) - 1)))

    # ---- after every step

    @invariant()
    def the_store_is_sound_and_is_the_model(self) -> None:
        for by in range(len(getattr(self, "writers", []))):
            if (writer := self.writer(by)) is None:
                continue
            live, deleted = [*self.live[by].values()], [thing for thing in self.deleted if thing.owner == by]
            assert [thing.key for thing in live] == writer.keys()
            stats, kept = writer.stats(), [thing for thing in deleted if self.held(thing)]
            assert len(live) + len(kept) <= stats.objects <= len(live) + len(deleted)
            for kind, has in stats.kinds.items():
                least, most = (sum(thing.kind == kind for thing in live + more) for more in (kept, deleted))
                assert least <= has.objects <= most
            assert stats.open_leases >= self.open_leases(by)
        if hasattr(self, "writers"):
            report = verify(self.name)
            assert report.ok, report

    @invariant()
    def no_view_has_changed_and_what_is_promised_can_be_read(self) -> None:
        for number, rank in enumerate(getattr(self, "ranks", ())):
            for thing, view in rank.views:
                assert thing.content == frozen(view)
            if rank.reader is not None:
                promised = [lease for lease in self.leases if lease.open and number in lease.expected]
                assert all(rank.reader.validate(lease.ref) for lease in promised)


def has_bytes(value: Any) -> bool:
    """Whether a value lies in the store: scalars do not, and what has no bytes need not."""
    tensor = value["x"] if isinstance(value, dict) else value
    tensor = tensor[0] if isinstance(tensor, list) else tensor
    return isinstance(tensor, torch.Tensor) and tensor.nbytes > 0


StoreMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestStoreAgainstAModel = StoreMachine.TestCase
