"""The figures of a tier in the segment: as `StoreTier` counts them, for each writer, until its process is replaced."""

import threading
from dataclasses import fields

import pytest
from shmstore.bindings._shmstore import ffi

from shmstore import ObjectStoreWriter
from shmstore.errors import TierFullError
from shmstore.inspect.inspector import StoreInspector
from shmstore.store.stats import TierStats
from shmstore.tiers import StoreTier
from tests.inspect.cases import peek, piped, poke
from tests.layout import FIELDS
from tests.support import SHM, Stores, until
from tests.tiers.memory import MemoryTier, late


class Clock:
    """A clock of whole seconds, whose sums have no rounding."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def figures(writer: ObjectStoreWriter) -> TierStats | None:
    """Return what an inspector sees, and check that the writer says the same."""
    with StoreInspector.open(writer.name) as inspector:
        found = inspector.facts().writers[writer.index].tier
    assert found == writer.stats().tier
    return found


def test_the_names_are_those_of_the_c_record() -> None:
    record = {name for name, _ in ffi.typeof("shms_tier_figures").fields}
    names = {field.name for field in fields(TierStats)}
    assert record - {"there", "saved_ns"} == names - {"saved_seconds"}


def test_a_store_without_a_tier_shows_none(stores: Stores) -> None:
    writer = stores.create()
    writer.put("k", 1)
    assert figures(writer) is None
    out = piped("dump", writer.name).out + piped("top", writer.name, "--iterations", "1").out
    assert "tier" not in out


def test_each_call_to_the_tier_is_shown_at_once(stores: Stores) -> None:
    writer, memory, clock = stores.create(), MemoryTier(), Clock()
    tier = StoreTier(writer, memory, clock=clock)
    assert figures(writer) == TierStats()
    assert "  tier: 0 hits" in piped("dump", writer.name).out

    def shown(**expected: float) -> None:
        assert figures(writer) == tier.stats() == TierStats(**{**seen, **expected})  # type: ignore[arg-type]
        seen.update(expected)

    seen: dict[str, float] = {}
    assert not tier.fetch("k")
    shown(misses=1)
    clock.now += 3
    writer.put("k", b"1234")
    tier.publish("k")  # processed in 3 s
    assert tier.flush(10)
    payload = len(next(iter(memory.values.values()))[1])
    shown(published=1, published_bytes=payload)
    writer.delete("k")
    assert tier.fetch("k")
    shown(hits=1, hit_bytes=payload, saved_seconds=3.0)
    memory.fail = TierFullError()
    tier.publish("k")
    assert tier.flush(10)
    shown(refused=1)
    memory.fail = None
    tier.publish("gone")
    assert tier.flush(10)
    shown(dropped=1)
    memory.fail = late()
    for _ in range(3):
        tier.fetch("absent")
    shown(errors=3, open=True)
    tier.fetch("absent")
    shown(skipped=1)
    memory.fail = None
    until(lambda: not (found := writer.stats().tier) or not found.open)  # when the tier answers again, too
    shown(open=False)
    memory.values.clear()
    tier.close()
    shown()


def test_what_waits_is_shown_when_a_call_ends_and_the_end_shows_what_was_dropped(stores: Stores) -> None:
    writer, memory = stores.create(), MemoryTier()
    tier = StoreTier(writer, memory, queue=2)
    for number in range(4):
        writer.put(f"k{number}", number)
    tier._write_behind.add("wait", lambda: memory.waiting.wait(10))
    until(lambda: not len(tier._write_behind))
    for number in range(4):
        tier.publish(f"k{number}")
    assert not tier.fetch("absent")
    assert figures(writer) == TierStats(misses=1, queued=2, dropped=2)
    tier.remove(["k0"])
    memory.waiting.set()
    assert tier.flush(10)
    assert figures(writer) == TierStats(misses=1, published=2, published_bytes=0, dropped=2)
    tier._write_behind.dropped += 1
    tier.close()
    assert figures(writer) == TierStats(misses=1, published=2, published_bytes=0, dropped=3)


def test_older_figures_never_replace_newer_ones(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stores.create()
    tier = StoreTier(writer, MemoryTier())
    counted = tier._stats
    other = threading.Thread(target=lambda: tier._count(misses=1))

    def slowly() -> TierStats:
        stats = counted()
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits, or it would be the first to write
        return stats

    monkeypatch.setattr(tier, "_stats", slowly)
    tier._count(hits=1)
    other.join(10)
    assert figures(writer) == TierStats(hits=1, misses=1)
    tier.close()


def test_a_hit_writes_no_figures(stores: Stores) -> None:
    writer = stores.create()
    tier = StoreTier(writer, MemoryTier())
    writer.put("k", 1)
    hits = FIELDS["tier"] + 8
    poke(SHM / writer.name, hits, 77)
    assert tier.fetch("k")
    tier.wait("k")
    writer.get_cached("k")
    assert peek(SHM / writer.name, hits) == 77
    assert not tier.fetch("absent")
    assert peek(SHM / writer.name, hits) == 0
    tier.close()


def test_a_successor_shows_a_tier_of_its_own_or_none(stores: Stores) -> None:
    writer, memory = stores.create(), MemoryTier()
    tier = StoreTier(writer, memory)
    tier.fetch("absent")
    tier.close()
    writer.close(unlink=False)
    with StoreInspector.open(writer.name) as inspector:
        assert inspector.facts().tier == TierStats(misses=1), "it can be looked at until then"
    following = stores.recover(writer.name)
    assert figures(following) is None
    own = StoreTier(following, memory)
    assert figures(following) == TierStats()
    tier._count(misses=1)  # as from a thread that outlives the store
    assert figures(following) == TierStats()
    own.close()


@pytest.fixture
def writers(stores: Stores) -> tuple[ObjectStoreWriter, ...]:
    """Three writers of a store; the first two have a tier, and the second's fails."""
    first = stores.create(capacity=1 << 16, n_writers=3)
    second, third = (stores.keep(ObjectStoreWriter.join(first.handle)) for _ in range(2))
    first._writer.show_tier(TierStats(hits=3, hit_bytes=2048, misses=2, saved_seconds=1.5, queued=1))
    second._writer.show_tier(TierStats(hits=4, hit_bytes=1024, errors=5, saved_seconds=2.5, queued=2, open=True))
    return first, second, third


def test_writers_have_their_own_figures_and_the_store_has_the_sum(writers: tuple[ObjectStoreWriter, ...]) -> None:
    with StoreInspector.open(writers[0].name) as inspector:
        facts = inspector.facts()
    assert [writer.tier and writer.tier.hits for writer in facts.writers] == [3, 4, None]
    assert facts.tier == TierStats(7, 3072, 2, errors=5, saved_seconds=4.0, queued=3, open=True)
    assert facts.tier.open is True, "not a sum, also in JSON"


@pytest.mark.alone
def test_top_of_all_stores_names_those_with_a_tier(writers: tuple[ObjectStoreWriter, ...], stores: Stores) -> None:
    other = stores.create()
    out = piped("top", "--iterations", "1").out
    assert f"\ntier of {writers[0].name}: 7 hits" in out
    assert other.name in out
    assert f"tier of {other.name}" not in out
