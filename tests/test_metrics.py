"""Metrics: a scrape shows what the store says, under Prometheus's conventions; the dashboard asks for no other."""

import ast
import gc
import json
import logging
import re
import runpy
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import yaml

from shmstore import ObjectRef, ObjectStoreWriter, ReaderStats, StaleRefError, StoreFullError, StoreStats
from shmstore.integrations.encoder.outputs import FIGURES
from shmstore.multimodal import (
    CacheInfo,
    LRUCache,
    MirroredProcessingCache,
    MultiModalCacheConfig,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from tests.multimodal.helpers import item
from tests.support import SHM, Stores, raises, random_tensor

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed; `make test` installs it")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shmstore import metrics
from shmstore.metrics import ShmStoreCollector
from shmstore.store.stats import MORE_HITS, TierStats

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "docs" / "guides" / "grafana-dashboard.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(collector: ShmStoreCollector) -> Samples:
    """Return {(sample's name, labels as pairs): value}, from the text that Prometheus would get."""
    registry = registry_of(collector)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def of_store(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_field_of_the_writers_statistics_is_shown_with_its_value(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=2)
    writer.retire(1)
    refs = [writer.put(str(i), random_tensor(i, 4096)) for i in range(5)]
    writer.get_cached("0")
    with pytest.raises(KeyError):
        writer.get_cached("absent")
    writer.cancel(refs[1])
    writer.delete("1")
    with pytest.raises(StoreFullError):
        writer.put("large", random_tensor(9, 61500))
    for ref in refs[2:]:
        writer.cancel(ref)
    writer.put("evicts", random_tensor(9, 50000))
    stats = writer.stats()
    assert 0 not in {stats.hits, stats.misses, stats.cancels, stats.deletes, stats.refusals, stats.evictions}

    samples = scrape(ShmStoreCollector(writer))
    shown = {field: samples[family.name, (("store", writer.name),)] for field, family in metrics._STORE.items()}
    expected = {field.name: getattr(stats, field.name) for field in fields(StoreStats)}
    expected.pop("next_id")  # the puts, counted again
    for factor, field in MORE_HITS.items():
        labels = (("factor", str(factor)), ("store", writer.name))
        assert expected.pop(field) == samples["shmstore_more_hits_total", labels]
    assert ({}, None) == (expected.pop("kinds"), expected.pop("tier"))
    assert {**expected, "next_lease": len(refs) + 2} == shown, "hand-outs: five puts, one hit, one put"
    assert len(shown) + len(MORE_HITS) == len(samples)


def test_each_of_several_writers_of_a_store_has_its_label(stores: Stores) -> None:
    first = stores.create(capacity=1 << 16, n_writers=2, quotas={"image": 0.5})
    second = stores.keep(ObjectStoreWriter.join(first.handle))
    first.put("a", torch.ones(4), kind="image")
    second.get_cached("a")
    samples = scrape(ShmStoreCollector(first, second))
    remote = [of_store(samples, "shmstore_remote_hits_total", store=first.name, writer=w) for w in "01"]
    puts = [of_store(samples, "shmstore_puts_total", store=first.name, writer=w) for w in "01"]
    assert ([0, 1], [1, 0]) == (remote, puts)
    assert 1 == of_store(samples, "shmstore_kind_objects", store=first.name, kind="image", writer="0")
    assert 0 == of_store(samples, "shmstore_more_hits_total", store=first.name, factor="2", writer="1")
    assert all("writer" in dict(labels) for _, labels in samples)


def test_an_owner_without_an_arena_shows_the_sums_over_all_writers(stores: Stores) -> None:
    owner = stores.create(capacity=1 << 16, n_writers=2, writes=False)
    collector = ShmStoreCollector(owner)
    writers = [stores.keep(ObjectStoreWriter.join(owner.handle)) for _ in range(2)]
    writers[0].put("a", torch.ones(4), kind="image")
    writers[1].put("b", torch.ones(4), kind="image")
    writers[1].get_cached("a")
    samples = scrape(collector)
    for name, value in {"capacity_bytes": 2 << 16, "objects": 2, "puts_total": 2, "remote_hits_total": 1}.items():
        assert value == of_store(samples, f"shmstore_{name}", store=owner.name)
    assert 2 == of_store(samples, "shmstore_kind_objects", store=owner.name, kind="image")
    gone = stores.create(writes=False)
    collector.watch(gone)
    (SHM / gone.name).unlink()
    owner.close()
    assert not scrape(collector)


def test_every_figure_of_a_tier_is_shown_for_the_writer_that_has_it(stores: Stores) -> None:
    first = stores.create(capacity=1 << 16, n_writers=3)
    second, third = (stores.keep(ObjectStoreWriter.join(first.handle)) for _ in range(2))
    names = [field.name for field in fields(TierStats)]
    for writer, more in ((first, 1), (second, 100)):
        every: Any = {name: more + at for at, name in enumerate(names)}
        writer._writer.show_tier(TierStats(**every))
    samples = scrape(ShmStoreCollector(first, second, third))
    for index, more in (("0", 1), ("1", 100)):
        shown = {
            name: of_store(samples, family.name, store=first.name, writer=index)
            for name, family in metrics._TIER.items()
        }
        assert {name: more + at for at, name in enumerate(names)} | {"open": 1} == shown
    tiers = [dict(labels)["writer"] for name, labels in samples if "tier" in name]
    assert {"0", "1"} == set(tiers), "a writer without a tier shows none"


def test_every_field_of_a_readers_statistics_is_shown_with_its_value(stores: Stores) -> None:
    writer = stores.create(n_readers=2)
    readers = [stores.attach(writer, rank) for rank in range(2)]
    ref = writer.put("a", torch.ones(4))
    view = readers[0].get(ref)
    readers[1].release(ref)
    data = ref.to_bytes()
    with pytest.raises(StaleRefError):
        readers[1].get(ObjectRef.from_bytes(data[:-1] + bytes([data[-1] ^ 1])))
    samples = scrape(ShmStoreCollector(*readers))
    for reader in readers:
        labels = (("rank", str(reader.rank)), ("store", writer.name))
        shown = {field: samples[family.name, labels] for field, family in metrics._READER.items()}
        assert {field.name: getattr(reader.stats(), field.name) for field in fields(ReaderStats)} == shown
    assert (1, 0) == tuple(of_store(samples, "shmstore_reader_live_views", store=writer.name, rank=r) for r in "01")
    assert (0, 1) == tuple(of_store(samples, "shmstore_reader_releases_total", store=writer.name, rank=r) for r in "01")
    assert (0, 1) == tuple(
        of_store(samples, "shmstore_reader_stale_refs_total", store=writer.name, rank=r) for r in "01"
    )
    del view


def test_a_sender_cache_shows_its_counts_its_inline_items_and_its_store(stores: Stores) -> None:
    config = MultiModalCacheConfig(cache_type="shm", processor_cache_gb=0.01, ipc_cache_gb=0.01)
    writer = stores.create(capacity=1 << 16, max_object_size=1 << 15)
    sender = ShmObjectStoreSenderCache(config, writer)
    for seed, nbytes in enumerate((30000, 30000, 30000, 40000)):
        sender.get_and_update_item((item(nbytes, seed), []), str(seed))
    sender.get_and_update_item(None, "0")
    collector = ShmStoreCollector()
    collector.watch(sender, "images")
    samples = scrape(collector)
    labels = {"cache": "images", "kind": "ShmObjectStoreSenderCache"}
    assert (1, 1) == (sender.inline_full, sender.inline_too_large)
    assert 1 == of_store(samples, "shmstore_cache_inline_items_total", reason="full", **labels)
    assert 1 == of_store(samples, "shmstore_cache_inline_items_total", reason="too_large", **labels)
    assert 0 == of_store(samples, "shmstore_cache_inline_items_total", reason="late", **labels)
    assert sender.make_stats() == CacheInfo(
        hits=int(of_store(samples, "shmstore_cache_hits_total", **labels)),
        total=int(of_store(samples, "shmstore_cache_lookups_total", **labels)),
    )
    assert 2 == of_store(samples, "shmstore_puts_total", store=writer.name)
    assert CacheInfo(1, 5) == sender.make_stats(delta=True), "a scrape takes nothing from who asks for a difference"


def test_every_cache_shows_its_counts_and_what_it_holds() -> None:
    settings = MultiModalCacheConfig(processor_cache_gb=0.01, ipc_cache_gb=0.01)
    kinds: list[Any] = [MultiModalProcessorOnlyCache, MultiModalProcessorSenderCache, MultiModalReceiverCache]
    only, sender, receiver, mirrored = (kind(settings) for kind in (*kinds, MirroredProcessingCache))
    plain: LRUCache[str, int] = LRUCache(10)
    for cache in (only, sender):
        for given, mm_hash in ((item(1000, 1), "a"), (None, "a"), (item(1000, 2), "b")):
            cache.get_and_update_item(given and (given, []), mm_hash)
    receiver.get_and_update_item(item(1000, 1), "a")
    for _ in range(3):
        mirrored.get_and_update_p0([item(1000, 1)], ["a"])
    plain["x"] = 1
    plain.get("x")
    plain.get("y")
    samples = scrape(ShmStoreCollector(only, sender, receiver, mirrored, plain))
    names = ("shmstore_cache_hits_total", "shmstore_cache_lookups_total", "shmstore_cache_items")
    for cache, expected in ((only, [1, 3, 2]), (sender, [1, 3, 2]), (mirrored, [2, 3]), (plain, [1, 2, 1])):
        labels = {"cache": "default", "kind": type(cache).__name__}
        assert expected == [of_store(samples, name, **labels) for name in names[: len(expected)]]
    labels = {"cache": "default", "kind": "MultiModalReceiverCache"}
    assert receiver.nbytes == of_store(samples, "shmstore_cache_used_bytes", **labels) > 0
    assert 1 == of_store(samples, "shmstore_cache_items", **labels)


def test_a_receiver_cache_by_reference_shows_its_reader(stores: Stores) -> None:
    writer = stores.create()
    by_reference = ShmObjectStoreReceiverCache(stores.attach(writer))
    collector = ShmStoreCollector(by_reference)
    assert 0 == of_store(scrape(collector), "shmstore_reader_gets_total", store=writer.name, rank="0")
    collector.forget(by_reference)
    assert {} == scrape(collector)


def test_names_follow_prometheus_conventions_and_each_has_help(stores: Stores) -> None:
    text = generate_latest(registry_of(ShmStoreCollector(stores.create()))).decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation.endswith(".") for family in families)
    for family in families:
        assert re.fullmatch(r"shmstore_[a-z_]+", family.name)
        assert family.type in ("counter", "gauge")
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_info"))  # these mean something else there
        if "bytes" in family.documentation.lower() and "Bytes" in family.documentation:
            assert "_bytes" in family.name
    counters = {line.split()[2] for line in text.splitlines() if line.endswith(" counter")}
    assert counters == {name for name in all_names() if name.endswith("_total")}


def registry_of(collector: ShmStoreCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def all_labels() -> dict[str, set[str]]:
    """Return the name of every sample that the collector can show, with its labels."""
    groups = (metrics._STORE, metrics._KIND, metrics._TIER, metrics._READER, metrics._CACHE)
    families = [family for group in groups for family in group.values()]
    return {family.name: set(family.labels) for family in (*families, metrics._INLINE, metrics._MORE_HITS)}


def all_names() -> set[str]:
    return set(all_labels())


def test_what_was_closed_or_has_gone_is_left_out_of_the_next_scrape(stores: Stores) -> None:
    closed, kept = stores.create(), stores.create()
    gone: LRUCache[str, int] = LRUCache(1)
    collector = ShmStoreCollector(closed, gone, kept)
    assert {closed.name, kept.name} == {dict(labels).get("store") for _, labels in scrape(collector)} - {None}
    closed.close()
    del gone
    gc.collect()
    assert {kept.name} == {dict(labels).get("store") for _, labels in scrape(collector)}


def test_a_store_that_cannot_be_looked_at_now_is_in_the_next_scrape(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = ShmStoreCollector(stores.create(n_writers=2, writes=False))
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_read_totals", Mock(side_effect=NotADirectoryError))
        assert not scrape(collector)
    assert scrape(collector)


def test_a_signal_handler_may_watch_and_forget_at_any_line_of_a_scrape(stores: Stores) -> None:
    kept, coming = stores.create(), stores.create()
    collector = ShmStoreCollector(kept)
    shown: list[str] = []

    def interfere(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != metrics.__file__:
            return None
        if event == "line":
            collector.watch(coming)
            collector.forget(coming)
        return interfere

    def work() -> None:
        sys.settrace(interfere)
        collector.watch(kept)
        metric = next(metric for metric in collector.collect() if metric.name == "shmstore_capacity_bytes")
        shown.extend(sample.labels["store"] for sample in metric.samples)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert [kept.name] == shown, "the handler waits for a lock that its own thread holds"


def test_two_objects_cannot_have_the_same_labels(stores: Stores) -> None:
    collector = ShmStoreCollector()
    one: LRUCache[str, int] = LRUCache(1)
    other: LRUCache[str, int] = LRUCache(1)
    collector.watch(one)
    with raises(ValueError, names=["'default'"]):
        collector.watch(other)
    collector.watch(other, "other")
    collector.watch(one)  # again: nothing new
    assert 2 == sum(name == "shmstore_cache_items" for name, _ in scrape(collector))
    collector.forget(one)
    collector.forget(one)
    assert 1 == sum(name == "shmstore_cache_items" for name, _ in scrape(collector))


def test_only_what_has_statistics_can_be_watched() -> None:
    with raises(TypeError, names=("target", "dict")):
        ShmStoreCollector(cast(Any, {}))
    with raises(TypeError, names=("name", "str", "int")):
        ShmStoreCollector().watch(LRUCache(1), cast(Any, 3))


def test_registering_asks_nobody_for_statistics(stores: Stores) -> None:
    writer = stores.create()
    collector = ShmStoreCollector(writer)
    asked: list[int] = []
    cast(Any, writer).stats = lambda: asked.append(1)
    registry_of(collector)
    assert [] == asked


def dashboard_expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if "refId" in str(variable)]
    return found + [rule["expr"] for rule in alert_rules()]


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(DASHBOARD.with_name("alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def labels_in_engines() -> dict[str, set[str]]:
    """Return the labels of the metrics that the plug-ins for vLLM and SGLang add, without importing an engine."""
    counters = [f"{figure}_total" for figure in FIGURES]
    encoder = {f"shmstore_encoder_{name}": {"model_name", "engine"} for name in (*counters, "apart")}
    source = (ROOT / "shmstore" / "integrations" / "sglang" / "preprocess.py").read_text()
    figures = ast.literal_eval(re.search(r"^FIGURES = (\{.*?^\})", source, re.M | re.S)[1])  # type: ignore[index]
    images = {f"shmstore_preprocess_{name}_total": {"model_name"} for name in figures}
    return encoder | images | {"shmstore_in_use": {"reason"}}


def test_every_alert_names_labels_that_its_metrics_have_and_some_panel_shows_each_engine_metric() -> None:
    labels = all_labels() | labels_in_engines()
    for rule in alert_rules():
        wanted = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        for name in re.findall(r"shmstore_\w+", rule["expr"]):
            assert wanted <= labels[name], rule["alert"]
    shown = set(re.findall(r"shmstore_\w+", DASHBOARD.read_text()))
    assert labels_in_engines().keys() <= shown
    assert {name for name in labels if name.startswith(("shmstore_tier_", "shmstore_kind_"))} <= shown


def test_the_dashboard_sums_over_the_writers_of_a_store() -> None:
    labels = all_labels() | labels_in_engines()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for expression in (target["expr"] for target in panel["targets"]):
            summed = re.findall(r"(?:sum|max) by \(([\w, ]+)\) \((?:\w+\()?(shmstore_\w+)", expression)
            assert all(set(by.split(", ")) <= labels[name] for by, name in summed), expression
            named = [name for name in re.findall(r"shmstore_\w+", expression) if "writer" in labels[name]]
            assert [] == [name for name in named if name not in {name for _, name in summed}], expression


def test_the_hit_ratio_of_the_dashboard_counts_what_readers_find_as_the_commands_do() -> None:
    ratios = [each for each in dashboard_expressions() if "shmstore_hits_total" in each and " / " in each]
    assert 5 == len(ratios)
    for part in (part for each in ratios for part in each.split(" / ")):
        assert "shmstore_reader_finds_total" in part


def test_every_metric_in_the_dashboard_exists_with_the_labels_asked_for() -> None:
    expressions = dashboard_expressions()
    assert len(expressions) > 15
    labels = all_labels() | labels_in_engines()
    for expression in expressions:
        named = re.findall(r"(shmstore_\w+)(?:\{([^}]*)\})?", expression)
        assert named, f"no metric in {expression}"
        for name, selector in named:
            assert name in labels, f"{name} is in the dashboard only"
            assert set(re.findall(r"(\w+)=~?", selector)) <= labels[name]
            if name.endswith("_total"):
                assert re.search(rf"(rate|increase)\({name}\b", expression), f"{name} is a counter: show its rate"


def test_every_label_in_a_legend_of_the_dashboard_exists() -> None:
    labels = all_labels() | labels_in_engines()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for name in re.findall(r"shmstore_\w+", target["expr"]):
                assert wanted <= labels[name], f"{panel['title']}: {name}"


def test_without_prometheus_client_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import shmstore, shmstore.metrics"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert 1 == done.returncode
    assert "pip install 'shmstore[metrics]'" in done.stderr.splitlines()[-1]


def test_the_log_is_quiet_until_the_application_asks() -> None:
    code = (
        "import logging, shmstore; log = logging.getLogger('shmstore.multimodal.x'); log.warning('before');"
        "logging.basicConfig(format='%(name)s %(message)s'); log.warning('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "shmstore.multimodal.x after\n" == done.stderr


@pytest.mark.checkout
def test_every_logger_of_the_package_is_below_shmstore() -> None:
    import shmstore.multimodal
    import shmstore.scheduler  # noqa: F401 - for their loggers

    pattern = re.compile(r"getLogger\(([^)]*)\)")
    sources = [
        path for path in (ROOT / "shmstore").rglob("*.py") if "integrations" not in path.parts
    ]  # an engine's own
    assert {"__name__"} == {argument for path in sources for argument in pattern.findall(path.read_text())}
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("shmstore").handlers)


@pytest.mark.checkout
def test_the_page_lists_every_metric_with_its_type() -> None:
    text = (ROOT / "docs" / "guides" / "metrics.md").read_text(encoding="utf-8")
    hook = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = hook["on_page_markdown"](text, page=None, config=None, files=None)
    listed = dict(re.findall(r"^\| `(shmstore_\w+)` \| (\w+) \|", page, re.M))
    assert {name: "counter" if name.endswith("_total") else "gauge" for name in all_names()} == listed
    assert all_names() | labels_in_engines().keys() >= set(re.findall(r"shmstore_\w+", page))
