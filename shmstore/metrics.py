"""Prometheus metrics of stores and caches, read at each scrape; needs the extra ``metrics`` (prometheus_client).

    collector = ShmStoreCollector()
    collector.watch(writer)                     # or a reader, or a multi-modal cache
    prometheus_client.REGISTRY.register(collector)

A scrape calls `stats()` of each watched object, so `put` and `get` cost the same without a collector. It leaves out
objects that were closed or garbage-collected.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shmstore.errors import MissingExtraError, NoArenaError, StoreClosedError, StoreNotFoundError
from shmstore.inspect.inspector import StoreInspector
from shmstore.store import KindStats, ObjectStoreReader, ObjectStoreWriter
from shmstore.store.stats import MORE_HITS

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError(what="shmstore.metrics", extra="metrics") from error

if TYPE_CHECKING:  # it needs torch, and stores do not
    from shmstore.multimodal import (
        BaseMultiModalProcessorCache,
        CacheInfo,
        LRUCache,
        MirroredProcessingCache,
        MultiModalReceiverCache,
        ShmObjectStoreReceiverCache,
    )

__all__ = ["ShmStoreCollector", "Watchable", "store_totals"]

Watchable: TypeAlias = (
    "ObjectStoreWriter | ObjectStoreReader | BaseMultiModalProcessorCache | MultiModalReceiverCache | "
    "ShmObjectStoreReceiverCache | MirroredProcessingCache | LRUCache[Any, Any]"
)
"""The types that `ShmStoreCollector.watch` takes: writers, readers and the caches of `shmstore.multimodal`."""

_Sample: TypeAlias = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric of Prometheus: a counter if its name ends in ``_total``, else a gauge.

    A sample with fewer values than there are labels has only the first ones.
    """

    name: str
    help: str
    labels: tuple[str, ...]

    def metric(self, samples: Iterable[_Sample] = ()) -> Metric:
        family: CounterMetricFamily | GaugeMetricFamily
        if self.name.endswith("_total"):
            family = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=self.labels)
        else:
            family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family


def _families(labels: tuple[str, ...], **named: tuple[str, str]) -> dict[str, _Family]:
    return {source: _Family(name, text, labels) for source, (name, text) in named.items()}


# The metric of each field of StoreStats, KindStats, TierStats, ReaderStats and CacheInfo. next_id is left out, because
# it counts puts again.
_STORE = _families(
    ("store", "writer"),
    capacity=("shmstore_capacity_bytes", "Size of the data region."),
    used_bytes=("shmstore_used_bytes", "Part of the data region under objects and unfinished puts."),
    max_object_size=("shmstore_max_object_size_bytes", "Largest object that the store accepts."),
    control_bytes=("shmstore_control_bytes", "Size of the segment besides the data region."),
    heap_bytes=("shmstore_writer_heap_bytes", "Size of the writer's private memory."),
    max_objects=("shmstore_max_objects", "Slots for objects."),
    objects=("shmstore_objects", "Objects stored, including deleted objects that are still held."),
    n_readers=("shmstore_expected_readers", "Ranks that a hand-out expects, if it names no group."),
    open_leases=("shmstore_open_leases", "Hand-outs that some rank has still to read, or that are held."),
    max_leases=("shmstore_lease_entries", "Hand-outs that can be open at a time."),
    puts=("shmstore_puts_total", "Objects stored."),
    put_bytes=("shmstore_put_bytes_total", "Bytes of tensors copied into the store."),
    next_lease=("shmstore_leases_total", "References handed out, by put and by get_cached."),
    hits=("shmstore_hits_total", "Calls of get_cached, and items asked of a sender cache, that found their key."),
    remote_hits=("shmstore_remote_hits_total", "Calls of get_cached that found their key in another writer's arena."),
    misses=("shmstore_misses_total", "Calls of get_cached that did not find their key."),
    evictions=("shmstore_evictions_total", "Objects reclaimed to make room."),
    evicted_bytes=("shmstore_evicted_bytes_total", "Bytes of the data region reclaimed to make room."),
    deletes=("shmstore_deletes_total", "Objects removed by delete and clear."),
    refusals=("shmstore_refusals_total", "Puts and hand-outs refused with StoreFullError."),
    cancels=("shmstore_cancels_total", "Leases ended by cancel and cancel_all."),
)
_MORE_HITS = _Family(
    "shmstore_more_hits_total",
    "Puts that would have been hits with `factor` times the capacity, as the store estimates.",
    ("store", "factor", "writer"),
)
_KIND = _families(
    ("store", "kind", "writer"),
    bytes=("shmstore_kind_bytes", "Part of the data region under objects of the kind."),
    objects=("shmstore_kind_objects", "Objects of the kind, deleted objects that are still held, and unfinished puts."),
    quota=("shmstore_kind_quota_bytes", "Bytes that the kind may have; not there without a quota."),
)
_TIER = _families(
    ("store", "writer"),
    hits=("shmstore_tier_hits_total", "Objects that came from the tier."),
    hit_bytes=("shmstore_tier_hit_bytes_total", "Bytes of tensors that came from the tier."),
    misses=("shmstore_tier_misses_total", "Keys that the tier did not have, or only from before they were forgotten."),
    declined=("shmstore_tier_declined_total", "Objects left in the tier: processing takes less, or there was no room."),
    damaged=("shmstore_tier_damaged_total", "Objects from the tier that did not verify or had unreadable updates."),
    errors=("shmstore_tier_errors_total", "Calls to the tier that failed."),
    skipped=("shmstore_tier_skipped_total", "Calls to the tier that were not made, because the last ones had failed."),
    published=("shmstore_tier_published_total", "Objects sent to the tier."),
    published_bytes=("shmstore_tier_published_bytes_total", "Bytes of tensors sent to the tier."),
    refused=("shmstore_tier_refused_total", "Objects for which the tier had no room."),
    dropped=("shmstore_tier_dropped_total", "Objects given up: full queue, evicted object, or failure of the tier."),
    queued=("shmstore_tier_queued_objects", "Objects that wait to be sent, as of the last call to the tier."),
    saved_seconds=("shmstore_tier_saved_seconds_total", "How much longer processing would have taken than fetches."),
    open=("shmstore_tier_circuit_open", "1 while the circuit is open because the tier failed, else 0."),
)
_READER = _families(
    ("store", "rank"),
    gets=("shmstore_reader_gets_total", "References turned into values."),
    stale=("shmstore_reader_stale_refs_total", "References refused."),
    released=("shmstore_reader_releases_total", "Leases ended by release, without a read."),
    finds=("shmstore_reader_finds_total", "Keys that a reader found."),
    find_misses=("shmstore_reader_find_misses_total", "Keys that a reader looked for and did not find."),
    live_views=("shmstore_reader_live_views", "Values of this reader that are still referenced."),
)
_CACHE = _families(
    ("cache", "kind"),
    hits=("shmstore_cache_hits_total", "Items found in the cache."),
    total=("shmstore_cache_lookups_total", "Items looked up in the cache."),
    items=("shmstore_cache_items", "Items that the cache holds, or expects its other side to hold."),
    used=("shmstore_cache_used_bytes", "Size of the items that the cache holds in its own process."),
)
_INLINE = _Family(
    "shmstore_cache_inline_items_total",
    "Items sent inline, because the store was full of unread items or does not accept their size.",
    ("cache", "kind", "reason"),
)


_FAMILIES = (
    *_STORE.values(),
    *_KIND.values(),
    _MORE_HITS,
    *_TIER.values(),
    *_READER.values(),
    *_CACHE.values(),
    _INLINE,
)


def store_totals(name: str) -> Iterable[Metric]:
    """Return the metrics of a whole store, summed over its writers, also the dead ones."""
    return _metrics(_read_totals(name, name))


_Found: TypeAlias = Iterable[tuple[_Family, _Sample]]


def _metrics(found: _Found) -> list[Metric]:
    samples: dict[_Family, list[_Sample]] = {family: [] for family in _FAMILIES}
    for family, sample in found:
        samples[family].append(sample)
    return [family.metric(ours) for family, ours in samples.items()]


def _read_totals(store: str, name: str) -> _Found:
    with StoreInspector.open(store) as inspector:
        yield from _read_store(inspector.facts(), inspector.kinds(), name)


def _read_writer(writer: ObjectStoreWriter, name: str) -> _Found:
    try:
        stats = writer.stats()
    except NoArenaError:  # an owner
        return _read_totals(writer.handle.path, name)
    which = (str(writer.index),) if writer.n_writers > 1 else ()
    return _read_store(stats, stats.kinds, name, *which)


def _read_store(stats: Any, kinds: Mapping[str, KindStats], name: str, *which: str) -> _Found:
    """Read `stats` of one writer, or of all: these lack what only a writer's process knows."""
    for field, family in _STORE.items():
        if (value := getattr(stats, field, None)) is not None:
            yield family, ((name, *which), value - 1 if field == "next_lease" else value)  # the first has number 1
    for factor, field in MORE_HITS.items():
        yield _MORE_HITS, ((name, str(factor), *which), getattr(stats, field))
    if stats.tier is not None:
        for field, family in _TIER.items():
            yield family, ((name, *which), getattr(stats.tier, field))
    for kind, has in kinds.items():
        for field, family in _KIND.items():
            if (value := getattr(has, field)) is not None:
                yield family, ((name, kind, *which), value)


def _read_reader(reader: ObjectStoreReader, name: str) -> _Found:
    stats = reader.stats()
    for field, family in _READER.items():
        yield family, ((name, str(reader.rank)), getattr(stats, field))


def _is_cache(target: Any, *names: str) -> bool:
    """Return whether `target` is of one of these types of shmstore.multimodal; there is none before that is loaded."""
    loaded = sys.modules.get("shmstore.multimodal")
    return isinstance(target, tuple(getattr(loaded, name, ()) for name in names))


def _read_cache(cache: Any, name: str) -> _Found:
    labels = (name, type(cache).__name__)
    lru = _is_cache(cache, "LRUCache")
    items = cache if lru else getattr(cache, "order", None)
    if items is not None:
        yield _CACHE["items"], (labels, len(items))
    if _is_cache(cache, "MultiModalReceiverCache"):  # nobody asks it for items, so it has no hits
        yield _CACHE["used"], (labels, cache.nbytes)
        return
    counts: CacheInfo = cache.stat() if lru else cache.make_stats()
    yield _CACHE["hits"], (labels, counts.hits)
    yield _CACHE["total"], (labels, counts.total)
    if _is_cache(cache, "ShmObjectStoreSenderCache"):
        inline = {"full": cache.inline_full, "too_large": cache.inline_too_large, "late": cache.inline_late}
        for reason, count in inline.items():
            yield _INLINE, ((*labels, reason), count)


@dataclass(frozen=True, slots=True)
class _Watched:
    target: "weakref.ref[Any]"
    name: str
    series: tuple[str, ...]
    """Identity of its series; no two watched objects may share it."""
    read: Callable[[Any, str], _Found]


class ShmStoreCollector(Collector):
    """A `prometheus_client` collector: the statistics of the objects that it watches; thread-safe.

    It holds weak references, so it keeps no object open or alive.
    """

    def __init__(self, *targets: Watchable) -> None:
        """Watch `targets` from the start, as `watch` does."""
        self._lock = threading.RLock()  # a signal handler or a finalizer may call watch or forget meanwhile
        self._watched: dict[int, _Watched] = {}
        for target in targets:
            self.watch(target)

    def watch(self, target: Watchable, name: str | None = None) -> None:
        """Show `target` from the next scrape on; give it the new name if it is already watched.

        `name` is the label ``store`` of a writer or reader (default: the store's name) and the label ``cache`` of a
        cache (default: ``default``). A sender cache of `shm` also shows its writer. A receiver cache of `shm` shows
        only its reader. Raises TypeError for any other object, and ValueError if another watched object has the same
        labels.
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        found = [_watched(target, name) for target, name in _parts(target, name)]
        with self._lock:
            self._forget_dead()
            for new in found:
                for key, old in list(self._watched.items()):
                    if old.series == new.series and key != id(new.target()):
                        raise ValueError(
                            f"another {old.series[0]} is already watched under the name {new.name!r}; pass another name"
                        )
            self._watched.update({id(new.target()): new for new in found})

    def forget(self, target: Watchable) -> None:
        """Stop showing `target`; do nothing if it is not watched."""
        with self._lock:
            for part, _ in _parts(target, None):
                self._watched.pop(id(part), None)

    def _forget_dead(self) -> None:
        for key, one in list(self._watched.items()):
            if one.target() is None and self._watched.get(key) is one:
                del self._watched[key]

    def describe(self) -> Iterable[Metric]:
        """Return every metric without samples, so that a registry can find names that are taken."""
        return [family.metric() for family in _FAMILIES]

    def collect(self) -> Iterable[Metric]:
        """Return the current value of every metric, without objects that were closed."""
        with self._lock:
            self._forget_dead()
            watched = [(one, target) for one in self._watched.values() if (target := one.target()) is not None]
        found: list[tuple[_Family, _Sample]] = []
        for one, target in watched:
            try:
                found += list(one.read(target, one.name))
            except (StoreClosedError, StoreNotFoundError):
                self.forget(target)
            except OSError:  # its folder cannot be looked into, or no descriptor is free: perhaps at the next scrape
                continue
        return _metrics(found)


def _parts(target: Any, name: str | None) -> list[tuple[Any, str | None]]:
    """Return what is shown of an object, and the name of each."""
    if _is_cache(target, "ShmObjectStoreReceiverCache"):
        return [(target.reader, name)]
    return [(target, name), *([(target.writer, None)] if _is_cache(target, "ShmObjectStoreSenderCache") else [])]


def _watched(target: Any, name: str | None) -> _Watched:
    if isinstance(target, ObjectStoreWriter):
        shown = target.name if name is None else name
        which = ""
        with suppress(NoArenaError):
            which = str(target.index)
        return _Watched(weakref.ref(target), shown, ("writer", shown, which), _read_writer)
    if isinstance(target, ObjectStoreReader):
        shown = target.name if name is None else name
        return _Watched(weakref.ref(target), shown, ("reader", shown, str(target.rank)), _read_reader)
    caches = ("BaseMultiModalProcessorCache", "MultiModalReceiverCache", "MirroredProcessingCache", "LRUCache")
    if _is_cache(target, *caches):
        shown = "default" if name is None else name
        return _Watched(weakref.ref(target), shown, ("cache", shown, type(target).__name__), _read_cache)
    raise TypeError(f"target must be a writer, a reader or a cache of shmstore, not {type(target).__name__}")
