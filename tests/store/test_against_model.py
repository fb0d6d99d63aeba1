"""One writer and three ranks against a model of plain dicts, every invariant after every step.

The model knows what is held, and a put that is refused must be justified by that. A writer closes leases and reclaims
deleted objects only when it needs room: until then the store may have more of both than the model.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
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
from tests.support import bits, frozen, length_of, random_tensor, span_of, store_name

CAPACITY = 16384
MAX_OBJECT_SIZE = 7000
MAX_OBJECTS = 12
LEASE_ENTRIES = 64
RANKS = range(3)

keys = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "ключ", "k" * 300])


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8]))
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = random_tensor(draw(st.integers(0, 10**6)), size)
    if dtype is torch.bool:
        raw &= 1
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    how = draw(st.sampled_from(["plain", "transposed", "array"]))
    if how == "transposed":
        return tensor.T if tensor.ndim == 2 else tensor[::2] if tensor.ndim else tensor
    return tensor.view(torch.uint8).numpy().copy() if how == "array" and tensor.ndim else tensor


large = st.builds(random_tensor, st.integers(0, 10**6), st.sampled_from([1500, 3000, 5000, 6500, 8000]))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
values = st.one_of(
    large,
    st.recursive(
        st.one_of(leaves(), scalars),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=5), inner, max_size=3),
        ),
        max_leaves=5,
    ),
)


@dataclass(eq=False)
class Object:
    key: str
    content: Any
    address: int
    span: int
    number: int
    deleted: bool = False
    gone: bool = False
    must_protect: int = 0


@dataclass(eq=False)
class Lease:
    ref: ObjectRef
    object: Object
    expected: set[int]
    """Ranks that have still to read it."""
    acknowledged: set[int] = field(default_factory=set)
    cancelled: bool = False


@dataclass(eq=False)
class Rank:
    reader: ObjectStoreReader | None = None
    """None while nobody is attached; its views may outlive it."""
    attached: bool = False
    """Ever."""
    retired: bool = False
    """And not attached since."""
    views: list[tuple[Object, Any]] = field(default_factory=list)

    @property
    def here(self) -> bool:
        return self.reader is not None

    @property
    def expected(self) -> bool:
        """By leases that are opened now."""
        return (self.here or not self.attached) and not self.retired


class StoreMachine(RuleBasedStateMachine):
    @initialize(present=st.sampled_from([{0, 1, 2}, {0, 1}, {2}]), eviction=st.sampled_from(["clock", "fifo"]))
    def start(self, present: set[int], eviction: Any) -> None:
        self.writer = ObjectStoreWriter.create(
            store_name(),
            capacity=CAPACITY,
            n_readers=len(RANKS),
            max_object_size=MAX_OBJECT_SIZE,
            max_objects=MAX_OBJECTS,
            eviction=eviction,
        )
        self.live: dict[str, Object] = {}
        self.deleted: list[Object] = []
        self.leases: list[Lease] = []
        self.ranks = [Rank() for _ in RANKS]
        self.blocks: list[tuple[ExitStack, set[str], list[Object]]] = []
        for number in present:
            self.attach(number)

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        for stack, _, _ in self.blocks:
            stack.close()
        for rank in self.ranks:
            if rank.reader is not None:
                rank.reader.close()
        for rank in self.ranks:
            for seen, view in rank.views:
                assert seen.content == frozen(view)  # views outlive everything
            rank.views.clear()
        self.writer.close()

    # ---- what the model knows

    def held(self, thing: Object) -> bool:
        return (
            thing.must_protect > 0
            or any(lease.expected for lease in self.leases if lease.object is thing)
            or any(seen is thing for rank in self.ranks for seen, _ in rank.views)
        )

    def open_lease(self, ref: ObjectRef, thing: Object) -> None:
        self.leases.append(Lease(ref, thing, {r for r in RANKS if self.ranks[r].expected}))

    def some_leases(self) -> list[Lease]:
        """Return mostly leases that mean something still, and a few that do not."""
        return [lease for lease in self.leases if not lease.object.gone][-20:] + self.leases[-4:] + self.leases[:2]

    def forget_rank(self, number: int) -> None:
        for lease in self.leases:
            lease.expected.discard(number)

    def open_leases(self) -> int:
        return sum(bool(lease.expected) for lease in self.leases)

    def gone(self, thing: Object) -> None:
        assert not self.held(thing), f"{thing.key} was reclaimed while somebody held it"
        thing.gone = True

    def figures(self) -> dict[str, int]:
        """What a refusal leaves as it is: leases that are over may be closed by it, refusals are counted."""
        stats = self.writer.stats()
        return {name: getattr(stats, name) for name in stats.__slots__ if name not in ("open_leases", "refusals")}

    def check_refusal_is_justified(self, span: int) -> None:
        held = [o for o in [*self.live.values(), *self.deleted] if self.held(o)]
        if len(held) >= MAX_OBJECTS or self.open_leases() >= LEASE_ENTRIES:
            return
        ends = sorted((o.address, o.address + o.span) for o in held)
        starts = [0, *(end for _, end in ends)]
        gaps = [at - start for start, at in zip(starts, [*(at for at, _ in ends), CAPACITY], strict=True)]
        assert max(gaps) < span, f"refused {span} bytes where gaps of {gaps} could be had"

    def stored(self, key: str, content: Any, span: int, before: Any, ref: ObjectRef | None) -> Object:
        """Books a put that succeeded, and the evictions that it made."""
        left = set(self.writer.keys())
        evicted = [name for name in self.live if name not in left]
        for name in evicted:
            self.gone(self.live.pop(name))
        after = self.writer.stats()
        assert len(evicted) == after.evictions - before.evictions
        if ref is None:
            ref = self.writer.get_cached(key)
        thing = Object(key, content, ref.address, span, ref.monotonic_id)
        assert before.next_id == ref.monotonic_id
        for other in [*self.live.values(), *self.deleted]:
            if thing.address < other.address + other.span and other.address < thing.address + thing.span:
                assert other.deleted, f"{key} was laid over {other.key}"
                self.gone(other)
        self.deleted = [other for other in self.deleted if not other.gone]
        self.live[key] = thing
        for _, names, kept in self.blocks:
            if key in names:
                kept.append(thing)
                thing.must_protect += 1
        self.open_lease(ref, thing)
        return thing

    # ---- the writer

    @rule(key=keys, value=values)
    def put(self, key: str, value: Any) -> None:
        content, length, span = frozen(value), length_of(key, value), span_of(key, value)
        before, names, figures = self.writer.stats(), self.writer.keys(), self.figures()
        try:
            ref = self.writer.put(key, value)
        except ObjectExistsError:
            assert key in self.live
        except ObjectTooLargeError:
            assert length > MAX_OBJECT_SIZE
        except StoreFullError:
            assert key not in self.live
            self.check_refusal_is_justified(span)
            assert before.refusals + 1 == self.writer.stats().refusals
        else:
            assert key not in self.live
            assert length <= MAX_OBJECT_SIZE
            self.stored(key, content, span, before, ref)
            return
        assert (names, figures) == (self.writer.keys(), self.figures())

    @rule(key=keys, size=st.sampled_from([0, 100, 2000, 6500]), seed=st.integers(0, 10**6), commit=st.booleans())
    def reserve(self, key: str, size: int, seed: int, commit: bool) -> None:
        template = {"x": TensorSpec((size,), torch.uint8), "n": seed}
        content = {"x": random_tensor(seed, size), "n": seed}
        span = span_of(key, content)
        before, names, figures = self.writer.stats(), self.writer.keys(), self.figures()
        entered = False
        try:
            with self.writer.reserve(key, template) as views:
                entered = True
                assert key not in self.writer
                with pytest.raises(ObjectExistsError):
                    self.writer.put(key, 1)
                views["x"].copy_(content["x"])
                if not commit:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            left = set(self.writer.keys())
            for name in [name for name in self.live if name not in left]:
                self.gone(self.live.pop(name))  # it had its room already
            return
        except ObjectExistsError:
            assert not entered
            assert key in self.live
        except StoreFullError:
            assert not entered
            self.check_refusal_is_justified(span)
        else:
            assert key not in self.live or self.live[key].gone
            try:
                ref = self.writer.get_cached(key)
            except StoreFullError:
                assert self.open_leases() >= LEASE_ENTRIES
                assert self.writer.delete(key)
                left = set(self.writer.keys())
                for name in [name for name in self.live if name not in left]:
                    self.gone(self.live.pop(name))
                return
            self.stored(key, frozen(content), span, before, ref)
            return
        assert (names, figures) == (self.writer.keys(), self.figures())

    @rule(seed=st.integers(0, 10**6), count=st.integers(1, 8), size=st.sampled_from([900, 2500, 4000]))
    def turn_over(self, seed: int, count: int, size: int) -> None:
        """Put objects that nobody waits for: the hand goes round."""
        for number in range(count):
            key = f"turn-{seed}-{number}"
            self.put(key, random_tensor(seed + number, size))
            if key in self.live and self.leases[-1].object is self.live[key]:
                self.cancel_lease(self.leases[-1])

    @rule(key=keys)
    def get_cached(self, key: str) -> None:
        try:
            ref = self.writer.get_cached(key)
        except ObjectNotFoundError:
            assert key not in self.live
        except StoreFullError:
            assert self.open_leases() >= LEASE_ENTRIES
        else:
            thing = self.live[key]
            assert (thing.number, thing.address) == (ref.monotonic_id, ref.address)
            self.open_lease(ref, thing)

    @rule(key=keys)
    def touch(self, key: str) -> None:
        assert self.writer.touch(key) == (key in self.live)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_lease(data.draw(st.sampled_from(self.some_leases())))

    def cancel_lease(self, lease: Lease) -> None:
        ended = self.writer.cancel(lease.ref)
        if lease.expected:
            assert ended
        if lease.cancelled or lease.object.gone:
            assert not ended
        lease.expected.clear()
        lease.cancelled = True

    @rule(key=keys)
    def delete(self, key: str) -> None:
        assert self.writer.delete(key) == (key in self.live)
        if key in self.live:
            self.mark_deleted(key)

    @precondition(lambda self: len(self.live) >= 5)
    @rule()
    def clear(self) -> None:
        before = self.writer.stats().next_id
        self.writer.clear()
        for key in list(self.live):
            self.mark_deleted(key)
        assert before == self.writer.stats().next_id

    def mark_deleted(self, key: str) -> None:
        thing = self.live.pop(key)
        thing.deleted = True
        if self.held(thing):
            self.deleted.append(thing)
        else:
            thing.gone = True

    @precondition(lambda self: not any(rank.retired for rank in self.ranks))
    @rule(number=st.sampled_from(RANKS))
    def retire(self, number: int) -> None:
        self.writer.retire(number)
        self.ranks[number].retired = True
        self.forget_rank(number)

    @rule(names=st.sets(keys, max_size=4))
    def protect(self, names: set[str]) -> None:
        stack = ExitStack()
        stack.enter_context(self.writer.protect(names))
        kept = [self.live[name] for name in names if name in self.live]
        for thing in kept:
            thing.must_protect += 1
        self.blocks.append((stack, names, kept))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def leave_block(self, data: st.DataObject) -> None:
        stack, _, kept = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        stack.close()
        for thing in kept:
            thing.must_protect -= 1

    @rule(by_handle=st.booleans())
    def recover(self, by_handle: bool) -> None:
        handle = self.writer.handle
        names, before = self.writer.keys(), self.writer.stats()
        self.writer.close(unlink=False)
        self.writer = ObjectStoreWriter.recover(handle if by_handle else handle.name)
        assert (names, handle) == (self.writer.keys(), self.writer.handle)
        assert before == self.writer.stats()
        for stack, _, kept in self.blocks:
            stack.close()
            for thing in kept:
                thing.must_protect -= 1
        self.blocks.clear()

    # ---- the readers

    @rule(number=st.sampled_from(RANKS))
    def attach(self, number: int) -> None:
        rank = self.ranks[number]
        try:
            reader = ObjectStoreReader.attach(self.writer.handle, number)
        except RankInUseError:
            assert rank.here or rank.views
            return
        assert not rank.here
        assert not rank.views
        rank.reader, rank.attached, rank.retired = reader, True, False

    @rule(number=st.sampled_from(RANKS), properly=st.booleans())
    def close(self, number: int, properly: bool) -> None:
        """Close a reader, or lose it: what it was promised is over at once, its views hold by their pins alone."""
        rank = self.ranks[number]
        if rank.reader is None:
            return
        if properly:
            rank.reader.close()
            rank.reader = None
        else:
            with pytest.warns(ResourceWarning, match="was not closed"):
                rank.reader = None
        self.forget_rank(number)

    @precondition(lambda self: self.leases and any(rank.here for rank in self.ranks))
    @rule(data=st.data(), copy=st.booleans())
    def get(self, data: st.DataObject, copy: bool) -> None:
        lease = data.draw(st.sampled_from(self.some_leases()))
        number = data.draw(st.sampled_from([r for r in RANKS if self.ranks[r].here]))
        rank, thing = self.ranks[number], lease.object
        assert rank.reader is not None
        there = rank.reader.validate(lease.ref)
        if thing.gone:
            assert not there
        elif not thing.deleted or self.held(thing):
            assert there
        if not there:
            with pytest.raises(StaleRefError):
                rank.reader.get(lease.ref, copy=copy)
            return
        value = rank.reader.get(lease.ref, copy=copy)
        assert thing.content == frozen(value)
        self.acknowledge(lease, number)
        if not copy and value_has_views(value):
            rank.views.append((thing, value))

    @precondition(lambda self: self.leases and any(rank.here for rank in self.ranks))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.some_leases()))
        number = data.draw(st.sampled_from([r for r in RANKS if self.ranks[r].here]))
        reader = self.ranks[number].reader
        assert reader is not None
        ended = reader.release(lease.ref)
        if lease.expected and number not in lease.acknowledged:
            assert ended
        if number in lease.acknowledged or lease.cancelled or lease.object.gone:
            assert not ended
        self.acknowledge(lease, number)

    def acknowledge(self, lease: Lease, number: int) -> None:
        lease.expected.discard(number)
        lease.acknowledged.add(number)

    @precondition(lambda self: any(rank.views for rank in self.ranks))
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([r for r in RANKS if self.ranks[r].views]))
        views = self.ranks[number].views
        views.pop(data.draw(st.integers(0, len(views) - 1)))

    # ---- after every step

    @invariant()
    def the_store_is_valid_and_is_the_model(self) -> None:
        if not hasattr(self, "writer"):
            return
        self.writer.check_valid()
        assert list(self.live) == self.writer.keys()
        assert len(self.live) == len(self.writer)
        stats = self.writer.stats()
        kept = sum(self.held(thing) for thing in self.deleted)
        assert len(self.live) + kept <= stats.objects <= len(self.live) + len(self.deleted)
        assert stats.open_leases >= self.open_leases()

    @invariant()
    def no_view_has_changed(self) -> None:
        for rank in getattr(self, "ranks", ()):
            for thing, view in rank.views:
                assert thing.content == frozen(view)


def value_has_views(value: Any) -> bool:
    """Whether a value lies in the store: scalars do not, and what has no bytes need not."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return len(bits(value)) > 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(value_has_views(part) for part in parts)


StoreMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestStoreAgainstAModel = StoreMachine.TestCase
