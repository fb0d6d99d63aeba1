"""Groups of ranks: a lease waits for one group, named at the hand-out or once later, and for all ranks otherwise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmstore import (
    LayoutMismatchError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StaleRefError,
    StoreFullError,
    TensorSpec,
)
from shmstore.inspect.inspector import StoreInspector
from tests.support import Stores, bits, random_tensor, span_of, store_name

SIZE = 900
SPAN = span_of("a", random_tensor(0, SIZE))


def value(seed: int) -> Any:
    return random_tensor(seed, SIZE)


def may_go(writer: ObjectStoreWriter, key: str) -> bool:
    """Delete the key, and say whether its object went at once."""
    before = writer.stats().used_bytes
    assert writer.delete(key)
    return writer.stats().used_bytes < before


# ---- creating


def test_the_groups_of_a_store_are_known_to_its_writers(stores: Stores) -> None:
    writer = stores.create(n_readers=8, groups=[4, 3, 1])
    assert (4, 3, 1) == writer.groups
    writer.close(unlink=False)
    assert (4, 3, 1) == stores.recover(writer.name).groups
    assert (5,) == stores.create(n_readers=5).groups
    assert (5,) == stores.create(n_readers=5, groups=[5]).groups
    assert (1,) * 255 == stores.create(n_readers=255, groups=(1,) * 255).groups
    with pytest.raises(ValueError, match="is 256 groups of 256 ranks"):
        stores.create(n_readers=256, groups=(1,) * 256)


def test_a_store_with_other_groups_is_another_store(stores: Stores) -> None:
    options: dict[str, Any] = {"name": store_name(), "capacity": 1 << 16, "n_readers": 8}
    writer = stores.keep(ObjectStoreWriter.open(**options, groups=[4, 4]))
    writer.put("k", value(1))
    writer.close(unlink=False)
    for other in (None, [8], [4, 3, 1], [3, 5]):
        with pytest.raises(LayoutMismatchError, match=r"groups is \(4, 4\), not "):
            ObjectStoreWriter.open(**options, groups=other, on_mismatch="raise")
    again = stores.keep(ObjectStoreWriter.open(**options, groups=(4, 4), on_mismatch="raise"))
    assert 1 == again.recovered
    again.close(unlink=False)
    made_again = stores.keep(ObjectStoreWriter.open(**options, groups=[2, 6]))
    assert ((2, 6), 0) == (made_again.groups, made_again.recovered)


@pytest.mark.parametrize(
    ("groups", "error", "text"),
    [
        ([4, 3], ValueError, "groups must have all 8 ranks between them, in up to 255 groups; [4, 3] is 2 groups of 7"),
        ([4, 5], ValueError, "[4, 5] is 2 groups of 9 ranks"),
        ([], ValueError, "[] is 0 groups"),
        ([8, 0], ValueError, "groups[1] must be from 1 to 8, not 0"),
        ([-1, 9], ValueError, "groups[0] must be from 1 to 8, not -1"),
        ([4, 4.0], TypeError, "groups[1] must be an int, not float"),
        ([True] * 8, TypeError, "groups[0] must be an int, not bool"),
        (8, TypeError, "groups must be a list of numbers of ranks, such as [4, 4], not int"),
        ("44", TypeError, "groups must be a list of numbers of ranks, such as [4, 4], not str"),
        ({4}, TypeError, "groups must be a list of numbers of ranks, such as [4, 4], not set"),
    ],
)
def test_groups_that_are_none_are_refused(groups: Any, error: type[Exception], text: str) -> None:
    for call in (ObjectStoreWriter.create, ObjectStoreWriter.open):
        with pytest.raises(error) as caught:
            call(name=store_name(), capacity=4096, n_readers=8, groups=groups)
        assert text in str(caught.value)


# ---- handing out


def test_every_way_to_hand_out_takes_a_group(stores: Stores) -> None:
    writer = stores.create(n_readers=3, groups=[2, 1])
    reader = stores.attach(writer, 2)

    with writer.reserve("cached", TensorSpec((SIZE,), torch.uint8)) as view:
        view[:] = value(1)
    strided = value(2).reshape(30, 30).T  # it is gathered: begin and commit, instead of one call
    assert writer._serde.encode(strided).fills
    refs = {
        "put": writer.put("put", value(3), group=1),
        "filled": writer.put("filled", strided, group=1),
        "held": writer.put("held", value(4), group=1, hold=True),
        "cached": writer.get_cached("cached", group=1),
    }
    with StoreInspector.open(writer.name) as inspector:
        assert [((2,), 1)] * 4 == [(lease.waiting_for, lease.group) for lease in inspector.leases()]
    for ref in refs.values():
        reader.get(ref)
    assert writer.cancel(refs["held"])
    assert all(may_go(writer, key) for key in refs)


@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        (2, ValueError, "this store has groups 0 to 1, and no group 2; pass groups=[...] where it is created"),
        (255, ValueError, "group must be from 0 to 254, not 255"),
        (-1, ValueError, "group must be from 0 to 254, not -1"),
        (1.0, TypeError, "group must be an int, not float"),
        (True, TypeError, "group must be an int, not bool"),
        ("1", TypeError, "group must be an int, not str"),
    ],
)
def test_a_group_that_does_not_exist_changes_nothing(
    stores: Stores, group: Any, error: type[Exception], text: str
) -> None:
    writer = stores.create(n_readers=3, groups=[2, 1])
    ref = writer.put("k", value(1))
    before = writer.stats()
    calls: list[Callable[[], Any]] = [
        lambda: writer.put("new", value(2), group=group),
        lambda: writer.get_cached("k", group=group),
        lambda: writer.get_cached("absent", group=group),
        lambda: writer.assign_group(ref, group),
    ]
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert text in str(caught.value)
    assert before == writer.stats()
    assert writer.assign_group(ref, 1)


def test_a_store_of_one_group_has_that_group(stores: Stores) -> None:
    writer = stores.create(n_readers=2)
    ref = writer.put("k", value(1), group=0)
    assert writer.assign_group(ref, 0)
    with pytest.raises(ValueError, match="this store has one group, 0, and no group 1"):
        writer.get_cached("k", group=1)


# ---- assign_group


def test_a_lease_gets_its_group_once_and_the_error_says_how_to_go_on(stores: Stores) -> None:
    writer = stores.create(n_readers=3, groups=[1, 1, 1])
    ref = writer.put("k", value(1))
    assert writer.assign_group(ref, 1)
    assert writer.assign_group(ref, 1)
    with pytest.raises(
        ValueError, match=r"waits for group 1 already, not for group 2; get_cached\(key, group=\.\.\.\)"
    ):
        writer.assign_group(ref, 2)
    with pytest.raises(TypeError, match="group must be an int, not NoneType"):
        writer.assign_group(ref, None)  # type: ignore[arg-type]
    other = writer.get_cached("k", group=2)
    assert writer.assign_group(other, 2)
    assert writer.cancel(ref)
    assert not writer.assign_group(ref, 1)
    with pytest.raises(TypeError, match="expected an ObjectRef, not bytes"):
        writer.assign_group(ref.to_bytes(), 1)  # type: ignore[arg-type]
    forged = ObjectRef.from_bytes(other.to_bytes()[:-1] + bytes([other.to_bytes()[-1] ^ 1]))
    with pytest.raises(StaleRefError):
        writer.assign_group(forged, 2)


# ---- processes


# ---- against a model

GROUPS = (1, 2, 1)
GROUP_OF = (0, 1, 1, 2)
FITS = 5
keys = st.sampled_from("abcdefg")
groups = st.sampled_from([None, 0, 1, 2])


@dataclass(eq=False)
class Lease:
    ref: ObjectRef
    group: int | None
    waiting: set[int]
    """Ranks of any group that have neither read it nor gone."""
    open: bool = True

    @property
    def waits_for(self) -> set[int]:
        if not self.open:
            return set()
        return {rank for rank in self.waiting if self.group is None or GROUP_OF[rank] == self.group}


@dataclass(eq=False)
class Object:
    seed: int
    leases: list[Lease] = field(default_factory=list)
    views: list[tuple[int, Any]] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    """Ranks that held nothing of it when they read it again. The store asks only those it knows to hold something."""
    gone: bool = False

    @property
    def holders(self) -> set[int]:
        return {rank for rank, _ in self.views}.union(*(lease.waits_for for lease in self.leases))


class GroupsMachine(RuleBasedStateMachine):
    """A dict of objects says which of them may be evicted, and who holds the others."""

    @initialize(present=st.sampled_from([(), (0, 1, 2, 3), (1, 2), (0, 3)]))
    def start(self, present: tuple[int, ...]) -> None:
        self.writer = ObjectStoreWriter.create(store_name(), capacity=FITS * SPAN, n_readers=4, groups=GROUPS)
        self.inspector = StoreInspector.open(self.writer.name)
        self.live: dict[str, Object] = {}
        self.deleted: list[Object] = []
        self.ranks: list[ObjectStoreReader | None] = [None] * 4
        self.expected = {0, 1, 2, 3}
        """Ranks that leases which are opened now expect."""
        for rank in present:
            self.attach(rank)

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            for reader in self.ranks:
                if reader is not None:
                    reader.close()
            self.inspector.close()
            self.writer.close()

    def lease(self, thing: Object, ref: ObjectRef, group: int | None) -> None:
        thing.leases.append(Lease(ref, group, set(self.expected)))

    def some_lease(self, data: st.DataObject) -> tuple[Object, Lease]:
        things = [*self.live.values(), *self.deleted]
        return data.draw(st.sampled_from([(thing, lease) for thing in things for lease in thing.leases]))

    def has_leases(self) -> bool:
        return any(thing.leases for thing in [*self.live.values(), *self.deleted])

    def stop_expecting(self, rank: int) -> None:
        self.expected.discard(rank)
        for thing in [*self.live.values(), *self.deleted]:
            for lease in thing.leases:
                lease.waiting.discard(rank)

    @rule(key=keys, seed=st.integers(0, 9), group=groups)
    def put(self, key: str, seed: int, group: int | None) -> None:
        if key in self.live:
            return
        things = [*self.live.values(), *self.deleted]
        held = [thing for thing in things if thing.holders]
        before = dict(self.live)
        try:
            ref = self.writer.put(key, value(seed), group=group)
        except StoreFullError as error:
            refused = error.held_bytes_by_rank
        else:
            refused = None
        assert (refused is None) == (len(held) < FITS)
        if refused is not None:
            for rank in range(4):
                holds = [rank not in thing.late for thing in held if rank in thing.holders]
                assert SPAN * sum(holds) <= refused.get(rank, 0) <= SPAN * len(holds)
            return
        for name in set(before) - set(self.writer.keys()):
            assert not before[name].holders, "an object that somebody waits for was evicted"
            del self.live[name]
        self.live[key] = Object(seed)
        self.lease(self.live[key], ref, group)

    @rule(key=keys, group=groups)
    def get_cached(self, key: str, group: int | None) -> None:
        try:
            ref = self.writer.get_cached(key, group=group)
        except ObjectNotFoundError:
            assert key not in self.live
        else:
            self.lease(self.live[key], ref, group)

    @precondition(has_leases)
    @rule(data=st.data(), group=st.sampled_from([0, 1, 2]))
    def assign_group(self, data: st.DataObject, group: int) -> None:
        _, lease = self.some_lease(data)
        over = not lease.waits_for  # the writer may have noticed, or not
        try:
            done = self.writer.assign_group(lease.ref, group)
        except ValueError:
            assert lease.open
            assert lease.group not in (None, group)
            return
        assert done or over
        assert lease.group in (None, group) or not done
        if done:
            lease.group = group

    @precondition(has_leases)
    @rule(data=st.data(), rank=st.integers(0, 3), keep=st.booleans(), unread=st.booleans())
    def read(self, data: st.DataObject, rank: int, keep: bool, unread: bool) -> None:
        thing, lease = self.some_lease(data)
        reader = self.ranks[rank]
        if reader is None:
            return
        if unread:
            reader.release(lease.ref)
        else:
            try:
                view = reader.get(lease.ref)
            except StaleRefError:
                assert thing in self.deleted
                assert not thing.holders
                return
            assert bits(value(thing.seed)) == bits(view)
            if keep:
                if rank not in thing.holders:
                    thing.late.add(rank)
                thing.views.append((rank, view))
        lease.waiting.discard(rank)

    @precondition(has_leases)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        _, lease = self.some_lease(data)
        assert self.writer.cancel(lease.ref) or not lease.waits_for
        lease.open = False

    @rule(data=st.data())
    def drop_a_view(self, data: st.DataObject) -> None:
        viewed = [thing for thing in [*self.live.values(), *self.deleted] if thing.views]
        if viewed:
            thing = data.draw(st.sampled_from(viewed))
            rank, _ = thing.views.pop()
            if rank not in thing.holders:
                thing.late.discard(rank)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        thing = self.live.pop(key, None)
        if thing is None:
            assert not self.writer.delete(key)
        elif not may_go(self.writer, key):
            assert thing.holders
            self.deleted.append(thing)
        else:
            assert not thing.holders

    @rule(rank=st.integers(0, 3))
    def attach(self, rank: int) -> None:
        viewed = {rank for thing in [*self.live.values(), *self.deleted] for rank, _ in thing.views}
        if self.ranks[rank] is None and rank not in viewed:
            self.ranks[rank] = ObjectStoreReader.attach(self.writer.handle, rank)
            self.expected.add(rank)

    @rule(rank=st.integers(0, 3))
    def close(self, rank: int) -> None:
        reader, self.ranks[rank] = self.ranks[rank], None
        if reader is not None:
            reader.close()
            self.stop_expecting(rank)

    @rule(rank=st.integers(0, 3))
    def retire(self, rank: int) -> None:
        self.writer.retire(rank)
        self.stop_expecting(rank)

    @invariant()
    def leases_wait_for_whom_the_model_says(self) -> None:
        if not hasattr(self, "writer"):
            return
        self.writer.check_valid()
        there = {lease.number: lease for lease in self.inspector.leases()}
        for thing in [*self.live.values(), *self.deleted]:
            for lease in thing.leases:
                found = there.get(lease.ref.lease)
                assert lease.waits_for == (set() if found is None else set(found.waiting_for))
                assert found is None or lease.group == found.group


GroupsMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestGroupsAgainstAModel = GroupsMachine.TestCase
