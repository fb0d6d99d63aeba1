"""The parts of the plug-in, without an engine: its switches, its look at vLLM, items, and the leases of requests."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from vllm.config import ParallelConfig
from vllm.multimodal import processing
from vllm.multimodal.cache import factories
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.utils.async_utils import make_async
from vllm.v1.engine import EngineCoreRequestType, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import shmstore
from shmstore.bindings.inspect import probe
from shmstore.inspect.inspector import StoreInspector
from shmstore.integrations.vllm import items, register, seams, shared
from shmstore.integrations.vllm import sender as sender_module
from shmstore.integrations.vllm.items import ReferenceItem, ref_of, register_items
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import RequestLeases, follow, follow_engines
from shmstore.integrations.vllm.sender import SenderCache
from shmstore.integrations.vllm.shared import HANDLE, RUN, STORE, TIER, WAIT
from shmstore.integrations.vllm.updates import decode_updates, encode_updates
from shmstore.metrics import ShmStoreCollector
from tests.support import segments

PromptUpdateDetails = processing.PromptUpdateDetails
processor: Any = sys.modules[PromptUpdateDetails.__module__]
FIELDS = [
    MultiModalBatchedField(),
    MultiModalBatchedField(keep_on_cpu=True),
    MultiModalSharedField(batch_size=3),
    MultiModalFlatField(slices=[slice(0, 4), slice(4, 9)], dim=1),
    MultiModalFlatField(slices=[[slice(0, 4), slice(6, None)], [slice(4, 6, 1)]]),
    MultiModalFlatField(slices=[slice(np.int64(0), np.int64(4))]),
    MultiModalFlatField(slices=[]),
]


METHODS = ("add_request", "abort_requests", "process_outputs")


# ---- switches


@pytest.mark.parametrize(("wanted", "comes"), [(None, 1), ("1", 1), ("strict", 1), ("0", 0)])
def test_the_environment_says_whether_the_plugin_comes(
    wanted: str | None, comes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[None] = []
    monkeypatch.setattr(seams, "install", lambda: came.append(None))
    monkeypatch.delenv("SHMSTORE_VLLM")
    if wanted is not None:
        monkeypatch.setenv("SHMSTORE_VLLM", wanted)
    register()
    assert comes == len(came)


def followed() -> list[Any]:
    return [AsyncMPClient._send_input, *(getattr(OutputProcessor, name) for name in METHODS)]


def test_the_factories_find_the_classes_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OutputProcessor, "_shmstore_leases", raising=False)
    register()
    assert not hasattr(OutputProcessor, "_shmstore_leases")  # a server without a sender cache pays nothing
    chosen = factories._get_cache_type
    assert hasattr(chosen, "__wrapped__")
    register()
    assert chosen is factories._get_cache_type
    assert (SenderCache, ReceiverCache) == (
        factories.ShmObjectStoreSenderCache,
        factories.ShmObjectStoreReceiverCache,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [*((f"SHMSTORE_VLLM{of}", "perhaps") for of in ("", "_READ", "_WAIT")), (WAIT, "-1"), (WAIT, "nan")],
)
def test_a_setting_that_means_nothing_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        register()


# ---- items


def item(*fields: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {f"key {n}": MultiModalFieldElem(data=torch.arange(5.0) + n, field=field) for n, field in enumerate(fields)}
    )


def same(one: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    return list(one) == list(other) and all(
        one[key].field == other[key].field and torch.equal(one[key].data, other[key].data) for key in one
    )


def test_an_item_comes_back_with_its_fields() -> None:
    register_items()
    whole = item(*FIELDS)
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
            found = reader.get(writer.put("item", whole))
            assert type(whole) is type(found)
            assert same(whole, found)
            nested = MultiModalKwargsItem(
                {"several": MultiModalFieldElem(data=[torch.zeros(2), [1, 2.5]], field=FIELDS[0])}
            )
            assert nested == reader.get(writer.put("nested", nested))


def test_slices_may_be_in_tuples() -> None:
    register_items()
    field = MultiModalFlatField(slices=[(slice(0, 4), slice(4, 9))])
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
            found = reader.get(writer.put("item", item(field)))["key 0"].field
    assert [[slice(0, 4), slice(4, 9)]] == found.slices


@pytest.mark.parametrize("tree", [5, [], ["[]"], ["[]", {}, 3], [5, {}], ["[]", 5], ["[]", {"a": 1}]])
def test_the_bytes_of_something_else_are_not_an_item(tree: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it is what the reader turns into a typed error
        items._from_tree(tree)


def test_a_reference_travels_as_vllms_messages_do() -> None:
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        ref = writer.put("item", b"")
        sent = ReferenceItem(writer.hold(ref), pytest.fail)
        messages = MsgpackEncoder().encode(sent)
        arrived = MsgpackDecoder(MultiModalKwargsItem).decode(messages)
        assert [ref, ref, None] == [ref_of(arrived), ref_of(pickle.loads(pickle.dumps(sent))), ref_of(item(*FIELDS))]
    for wrong in ([1, 2], 5, torch.zeros(5)):
        with pytest.raises(ValueError):  # noqa: PT011 - it is what vLLM catches
            ref_of({"address": MultiModalFieldElem(data=wrong, field=FIELDS[0])})


# ---- the leases of requests


class Desk:
    """What `follow` needs of an `OutputProcessor`, and a store with one item for each request."""

    stopped: tuple[str, ...] = ()
    """Requests that the next output ends, though the core has not finished them."""

    def __init__(self, writer: shmstore.ObjectStoreWriter) -> None:
        self.writer = writer
        self.request_states: dict[str, Any] = {}

    @property
    def books(self) -> Any:
        return vars(self).get("_shmstore_leases")

    @property
    def opened(self) -> int:
        return self.writer.stats().open_leases

    def item(self, name: str) -> ReferenceItem:
        again = partial(sender_module.SenderCache._lease_again, cast(Any, self), name)
        return ReferenceItem(self._held(self.writer.put(name, b"")), again)

    def _held(self, ref: shmstore.ObjectRef) -> shmstore.LeasedRef:
        return self.writer.hold(ref)

    def request(self, name: str, *, children: int = 1) -> None:
        features = [SimpleNamespace(data=self.item(name))]
        for child in range(children):
            request_id = name if children == 1 else f"{child}_{name}"
            self.add_request(SimpleNamespace(request_id=request_id, mm_features=features))

    def output(
        self,
        name: str,
        *,
        finished: bool = False,
        reason: Any = FinishReason.STOP,
        tokens: tuple[int, ...] = (1,),
        pooled: Any = None,
    ) -> Any:
        of = {"request_id": name, "new_token_ids": tokens, "pooling_output": pooled}
        return self.process_outputs(
            [SimpleNamespace(**of, finished=finished, finish_reason=reason if finished else None)]
        )

    def add_request(self, request: Any) -> str:
        self.request_states[request.request_id] = request
        if getattr(request, "last", False):
            del self.request_states[request.request_id]
        return "added"

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        return [request_id for request_id in request_ids if self.request_states.pop(request_id, None)]

    def process_outputs(self, engine_core_outputs: list[Any]) -> Any:
        if hasattr(self, "own_outputs"):
            return self.own_outputs(engine_core_outputs)
        for output in engine_core_outputs:
            if output.finished or output.request_id in self.stopped:
                self.request_states.pop(output.request_id, None)
        return "processed"


follow(Desk)


@pytest.fixture
def writer() -> Iterator[shmstore.ObjectStoreWriter]:
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as made:
        yield made


@pytest.fixture
def desk(writer: shmstore.ObjectStoreWriter) -> Desk:
    return Desk(writer)


def test_a_lease_ends_when_the_core_has_finished_its_request(desk: Desk) -> None:
    desk.request("a")
    desk.output("a")
    assert 1 == desk.opened
    desk.output("a", finished=True)
    assert 0 == desk.opened


def test_the_children_of_a_request_share_its_lease_until_the_last_has_ended(desk: Desk) -> None:
    desk.request("a", children=3)
    for child in (1, 0):
        desk.output(f"{child}_a", finished=True)
        assert 1 == desk.opened
    desk.output("2_a", finished=True)
    assert 0 == desk.opened


def test_a_lease_of_an_aborted_request_lasts_until_a_later_one_has_a_token(desk: Desk) -> None:
    for name in "abc":
        desk.request(name)
    desk.abort_requests(["b"])
    desk.output("a")
    desk.output("c")  # both were there before
    assert 3 == desk.opened
    desk.request("d")
    desk.output("d", tokens=())  # not a token yet
    assert 4 == desk.opened
    desk.output("d")
    assert 3 == desk.opened


class Client:
    """The part of `AsyncMPClient` that the plug-in wraps."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def _send_input(self, request_type: Any, request: Any, engine: bytes | None = None) -> str:
        self.sent.append((request_type, request, engine))
        return "sent"


follow_engines(Client)


def test_a_token_of_another_engine_says_nothing_about_an_aborted_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestLeases, "engines", {})
    client = Client()
    for name, engine in (("a", b"0"), ("b", b"1"), ("unsent", None), ("c", b"1"), ("d", b"0")):
        if name == "c":
            desk.abort_requests(["a", "b", "unsent"])
            assert 3 == desk.opened
        desk.request(name)
        if engine:
            request = SimpleNamespace(request_id=name)
            assert "sent" == client._send_input(EngineCoreRequestType.ADD, request, engine)
            assert client.sent[-1] == (EngineCoreRequestType.ADD, request, engine)
    desk.output("c")
    assert 3 == desk.opened  # a, c and d: b was sent to the engine of c, and `unsent` to none
    desk.output("d")
    assert 2 == desk.opened
    for name in "cd":
        desk.output(name, finished=True)
    client._send_input(EngineCoreRequestType.ABORT, ["c"], b"0")
    client._send_input(EngineCoreRequestType.ADD, SimpleNamespace(request_id="unknown"), b"0")
    assert {} == RequestLeases.engines


def test_an_embedding_is_as_good_as_a_token(desk: Desk) -> None:
    for name in "ab":
        desk.request(name)
        desk.abort_requests([name])
    desk.request("c")
    desk.output("c", tokens=(), pooled=torch.zeros(1), finished=True)
    assert 0 == desk.opened


def test_an_item_that_was_sent_itself_is_not_kept(desk: Desk) -> None:
    feature = SimpleNamespace(data=item(*FIELDS))
    seen = weakref.ref(feature.data)
    desk.add_request(SimpleNamespace(request_id="a", mm_features=[feature]))
    feature.data = None
    assert seen() is None


def test_the_methods_return_what_they_returned_and_a_text_has_no_items(desk: Desk) -> None:
    assert "added" == desk.add_request(SimpleNamespace(request_id="text", mm_features=None))
    assert "processed" == desk.output("text")
    assert ["text"] == desk.abort_requests(["text", "unknown"])


@pytest.mark.parametrize("aborted", [False, True])
def test_a_lease_ends_with_its_request_whatever_keeps_the_item(desk: Desk, aborted: bool) -> None:
    features = [SimpleNamespace(data=desk.item("a"))]
    desk.add_request(SimpleNamespace(request_id="a", mm_features=features))
    if aborted:
        desk.abort_requests(["a"])
        desk.request("b")
        desk.output("b")
        desk.output("b", finished=True)
    else:
        desk.output("a", finished=True)
    assert 0 == desk.opened


def test_a_later_request_for_an_item_opens_a_lease_of_its_own(desk: Desk) -> None:
    sent = desk.item("a")
    request = SimpleNamespace(request_id="step", mm_features=[SimpleNamespace(data=sent)])
    for _ in range(3):  # as a beam search does
        desk.add_request(request)
        assert 1 == desk.opened
        assert desk.writer.validate(cast(Any, ref_of(sent)), "a")
        desk.output("step", finished=True)
        assert 0 == desk.opened
    desk.writer.delete("a")
    with pytest.raises(ValueError, match="'a'"):
        desk.add_request(request)
    assert {} == desk.request_states


def test_texts_enter_no_table_unless_a_token_is_awaited(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLeases, "engines", {})

    def text(name: str) -> None:
        desk.add_request(SimpleNamespace(request_id=name, mm_features=None))
        desk.output(name)

    text("before")
    desk.output("before", finished=True)
    assert [None] == [desk.books]
    desk.request("a")
    text("gone")
    desk.abort_requests(["gone"])
    text("beside")
    assert {} == desk.books.aborted
    assert ["a"] == [*desk.books.sent]
    desk.abort_requests(["a"])
    desk.output("beside")
    assert 1 == desk.opened
    text("after")  # its token says that the workers are past `a`
    assert 0 == desk.opened
    assert ({}, {}, {}) == (desk.books.sent, desk.books.aborted, RequestLeases.engines)


def test_a_step_without_items_does_nothing_but_vllms_own(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.request("a")
    desk.output("a", finished=True)

    class Unread:
        def __iter__(self) -> Any:
            pytest.fail("the plug-in looks at each output")

    outputs: Any = Unread()
    monkeypatch.setattr(desk, "own_outputs", lambda given: given, raising=False)
    assert outputs is desk.process_outputs(outputs)


def test_the_last_part_of_a_stream_ends_the_leases_of_all_parts(desk: Desk) -> None:
    desk.request("stream")
    desk.request("b")
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=None, last=True))
    assert 1 == desk.opened


def test_a_request_that_a_stop_string_ended_may_be_in_the_core_still(desk: Desk) -> None:
    desk.request("a")
    desk.stopped = ("a",)
    desk.output("a")
    assert 1 == desk.opened
    desk.request("b")
    desk.output("b", finished=True)
    assert 0 == desk.opened


def test_a_token_of_a_streams_first_part_ends_no_lease_from_before_its_second(desk: Desk) -> None:
    desk.request("stream")
    desk.request("b")
    desk.abort_requests(["b"])
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=[SimpleNamespace(data=desk.item("second"))]))
    desk.output("stream")
    assert 3 == desk.opened
    desk.request("c")
    desk.output("c")
    assert 3 == desk.opened
    desk.output("stream", finished=True)
    assert 1 == desk.opened


def test_a_token_of_a_streams_text_says_nothing_about_what_came_before_its_item(desk: Desk) -> None:
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=None))
    desk.request("b")
    desk.abort_requests(["b"])
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=[SimpleNamespace(data=desk.item("second"))]))
    desk.output("stream")
    assert 2 == desk.opened


def test_a_request_that_the_core_aborts_may_be_on_its_way_to_the_workers(desk: Desk) -> None:
    desk.request("a")
    desk.output("a", finished=True, reason=FinishReason.ABORT)
    assert 1 == desk.opened
    desk.request("b")
    desk.output("b", finished=True)
    assert 0 == desk.opened


def test_an_item_that_nobody_has_sent_ends_its_lease(desk: Desk) -> None:
    sent = desk.item("a")
    assert 1 == desk.opened
    del sent
    assert 0 == desk.opened


def test_two_processors_know_nothing_of_each_other(desk: Desk) -> None:
    other = Desk(desk.writer)
    desk.request("a")
    other.add_request(SimpleNamespace(request_id="a", mm_features=[]))
    other.output("a", finished=True)
    assert 1 == desk.opened


# ---- both caches, without an engine


def config(
    gib: float = 2**-10, workers: int = 1, most: int = 1, kind: str = "shm", name: str = "tiny", **parallel: Any
) -> Any:
    """Return what the caches read of vLLM's configuration."""
    settings = SimpleNamespace(
        mm_processor_cache_gb=gib, mm_shm_cache_max_object_size_mb=most, mm_processor_cache_type=kind
    )
    model = SimpleNamespace(
        get_multimodal_config=lambda: settings, supports_multimodal_inputs=True, model=name, revision=None
    )
    chosen = ParallelConfig()
    for setting, value in {"world_size": workers, **parallel}.items():
        setattr(chosen, setting, value)
    return SimpleNamespace(model_config=model, parallel_config=chosen)


@pytest.fixture
def sender() -> Iterator[SenderCache]:
    made = SenderCache(config(workers=3))
    yield made
    made.close()


def received(cache: ReceiverCache, sent: Any) -> Any:
    feature = SimpleNamespace(data=sent, identifier="a")
    assert [feature] == cache.get_and_update_features([feature, SimpleNamespace(data=None)])[:1]
    return feature.data


def test_a_sender_follows_the_requests_of_its_process(sender: SenderCache) -> None:
    before = followed()
    assert all(hasattr(method, "__wrapped__") for method in before)
    follow(OutputProcessor)
    follow_engines(AsyncMPClient)
    assert before == followed()


def test_a_miss_and_a_hit_give_a_reference_and_the_prompt_updates(sender: SenderCache) -> None:
    whole, updates = item(*FIELDS), ["update"]
    assert not sender.is_cached_item("a")
    sent = [sender.get_and_update_item((whole, updates), "a")]
    assert sender.is_cached_item("a")
    sent.append(sender.get_and_update_item(None, "a"))
    assert [updates, updates] == [list(found) for _, found in sent]
    cache = ReceiverCache(None, None)
    for reference, _ in sent:
        assert same(whole, received(cache, reference))
        assert same(whole, received(cache, reference))
    assert (1, 2) == (sender.make_stats().hits, sender.make_stats(delta=True).total)
    assert (0, 0) == (sender.make_stats(delta=True).hits, sender.make_stats(delta=True).total)
    del sent, reference
    assert 0 == sender.writer.stats().open_leases


def test_items_are_counted_by_the_modality_of_their_updates(sender: SenderCache) -> None:
    for mm_hash, modality in (("a", "image"), ("b", "audio"), ("c", "audio")):
        sender.get_and_update_item((item(*FIELDS), [SimpleNamespace(modality=modality)]), mm_hash)
    assert {"audio": 2, "image": 1} == {kind: has.objects for kind, has in sender.writer.stats().kinds.items()}


def test_an_item_whose_owner_was_stopped_is_sent_inline(sender: SenderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: shmstore.ObjectStoreWriter, ref: shmstore.ObjectRef) -> None:
        raise shmstore.ObjectBusyError

    monkeypatch.setattr(shmstore.ObjectStoreWriter, "hold", stopped)
    whole = item(*FIELDS)
    sent, updates = sender.get_and_update_item((whole, ["update"]), "a")
    assert sent is whole
    assert ["update"] == list(updates)
    assert not sender.is_cached_item("a")
    assert 0 == sender.writer.stats().open_leases


def prompt_updates() -> list[Any]:
    """Return updates as models make them: with a mask, without, and many tokens."""
    details = [
        PromptUpdateDetails.select_token_id([1, 2, 2, 3], 2),
        PromptUpdateDetails.from_seq([7] * 5000),
        PromptUpdateDetails.select_token_ids(list(range(300)), [5, 299]),
    ]
    return [
        processor.ResolvedPromptUpdate("image", number, processor.UpdateMode(mode), [151655, number], content)
        for number, (mode, content) in enumerate(zip(["insert", "replace", "replace"], details, strict=True))
    ]


def plain(updates: list[Any]) -> list[Any]:
    """Return updates as values that compare: the masks in the place of their functions."""
    return [
        (one.modality, one.item_idx, one.mode, one.target, one.content.full)
        + ((one.content.is_embed(one.content.full).tolist(),) if one.content.is_embed else ())
        for one in updates
    ]


def test_prompt_updates_come_back_with_the_answers_of_their_functions() -> None:
    packed = encode_updates(prompt_updates())
    assert packed is not None
    updates = decode_updates(packed)
    assert plain(prompt_updates()) == plain(updates)
    assert updates[0].with_content([1]).content.full == [1]
    at_start = processor.PromptIndexTargets.start()
    for odd in (prompt_updates()[0].with_target(at_start), "update"):
        assert encode_updates([odd]) is None


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a store that outlives its caches."""
    name = f"vllm-plugin-{os.getpid()}"
    monkeypatch.setenv(STORE, name)
    yield name
    shmstore.ObjectStoreWriter.unlink(name)


def test_the_next_api_server_has_the_items_and_their_updates(named: str) -> None:
    first = SenderCache(config())
    sent = first.get_and_update_item((item(*FIELDS), prompt_updates()), "a")[0]
    first.get_and_update_item((item(*FIELDS), ["not data"]), "b")
    first.close()
    second = SenderCache(config())
    assert (2, 0) == (second.writer.recovered, second.writer.stats().open_leases)
    del sent  # the dead server's
    assert [True, False] == [second.is_cached_item("a"), second.is_cached_item("b")]
    for _ in range(2):
        sent, updates = second.get_and_update_item(None, "a")
        assert plain(prompt_updates()) == plain(updates)
        assert same(item(*FIELDS), received(ReceiverCache(None, None), sent))
    second.close()


def test_what_came_along_is_not_cleared_before_the_first_request(named: str, desk: Desk) -> None:
    first = SenderCache(config())
    first.get_and_update_item((item(*FIELDS), prompt_updates()), "a")
    first.close()
    desk.request("of the first server")
    second = SenderCache(config())
    second.clear_cache()  # as vLLM does at its start
    assert second.is_cached_item("a")
    desk.request("a")
    second.clear_cache()
    assert not second.is_cached_item("a")
    second.close()


def test_a_server_of_another_host_has_the_items_and_their_updates_by_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIER, tmp_path.as_uri())
    first, stranger, second = SenderCache(config()), SenderCache(config(name="another")), SenderCache(config())
    first.get_and_update_item((item(*FIELDS), prompt_updates()), "a")
    assert first._sender.tier.flush(10)
    second.clear_cache()  # as vLLM does at its start
    assert [True, False] == [second.is_cached_item("a"), stranger.is_cached_item("a")]
    sent, updates = second.get_and_update_item(None, "a")
    assert plain(prompt_updates()) == plain(updates)
    assert same(item(*FIELDS), received(ReceiverCache(None, None), sent))
    for cache in (first, second, stranger):
        cache.close()


def test_a_second_server_of_the_same_name_is_told_what_to_do(named: str) -> None:
    first = SenderCache(config())
    with pytest.raises(shmstore.WriterActiveError) as caught:
        SenderCache(config())
    assert str(os.getpid()) in caught.value.message
    assert STORE in caught.value.hint
    first.close()


def test_a_store_of_encoder_outputs_is_not_replaced_by_a_processor_cache(named: str) -> None:
    def encoder(put: bool) -> int:
        with shmstore.ObjectStoreWriter.open(named, capacity=1 << 20, n_readers=2) as writer:
            if put:
                writer.put("a", torch.ones(1), kind="encoder", namespace="model")
            return len(writer)

    encoder(put=True)
    with pytest.raises(shmstore.LayoutMismatchError) as caught:
        SenderCache(config())
    assert all(part in caught.value.hint for part in (STORE, f"shmstore gc {named} --yes --force"))
    assert 1 == encoder(put=False)


def test_what_a_worker_holds_is_as_its_setting_says(sender: SenderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = item(*FIELDS)
    sent, _ = sender.get_and_update_item((whole, []), "a")
    for setting, pinned in (("copy", 0), ("views", 1), ("private", 1), ("until_step", 0)):
        monkeypatch.setenv("SHMSTORE_VLLM_READ", setting)
        cache = ReceiverCache(None, None)
        found = received(cache, sent)
        assert same(whole, found)
        assert isinstance(found, MultiModalKwargsItem)
        assert pinned == cache.reader.stats().live_views
        assert same(whole, pickle.loads(pickle.dumps(found)))
        if setting in ("copy", "private"):
            found["key 0"].data.zero_()
            assert same(whole, received(cache, sent))
        del found
        gc.collect()
        assert 0 == cache.reader.stats().live_views


def test_the_settings_of_vllm_are_those_of_the_store() -> None:
    cache = SenderCache(config(gib=2**-8, workers=3))
    try:
        with StoreInspector.open(cache.writer.name) as inspector:
            facts = inspector.facts()
        assert (1 << 22, 1 << 20, 3, ("prefault",)) == (
            *(facts.capacity, facts.max_object_size, facts.n_readers, facts.options),
        )
    finally:
        cache.close()


ENGINES: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 2}


@pytest.mark.parametrize(
    ("kind", "parallel", "expected"),
    [
        ("shm", {}, "shm"),
        ("shm", ENGINES, "shm"),
        ("lru", ENGINES, "processor_only"),
        ("shm", ENGINES | {"data_parallel_size_local": 1}, "processor_only"),
        ("shm", ENGINES | {"data_parallel_size_local": 1, "data_parallel_external_lb": True}, "shm"),
        ("shm", ENGINES | {"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "shm"),
        ("shm", ENGINES | {"data_parallel_backend": "ray"}, "processor_only"),
        ("shm", {"_api_process_count": 2}, "shm"),
        ("shm", ENGINES | {"_api_process_count": 2}, "shm"),
        ("shm", {"data_parallel_size": 4, "_api_process_count": 2}, "processor_only"),
    ],
)
def test_engines_on_one_host_share_the_store_of_their_api_server(kind: str, parallel: Any, expected: str) -> None:
    register()
    assert expected == factories._get_cache_type(config(kind=kind, **parallel))


def test_each_worker_of_each_engine_is_a_reader_of_the_store() -> None:
    for parallel, readers in ((ENGINES, 6), ({**ENGINES, "data_parallel_size": 4, "data_parallel_hybrid_lb": True}, 6)):
        cache = SenderCache(config(workers=3, **parallel))
        try:
            assert readers == cache.writer.handle.n_readers
        finally:
            cache.close()


@pytest.mark.parametrize("kept", [False, True], ids=["for one run", "of a chosen name"])
def test_api_servers_share_what_either_has_stored_and_the_last_one_ends_their_store(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    name = f"shmstore-{os.getpid()}-shared"
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv(STORE if kept else RUN, name)
    monkeypatch.setattr(sender_module, "_collector", ShmStoreCollector)  # each is in a process of its own
    whole = item(*FIELDS)
    one, other = (SenderCache(config(_api_process_count=2)) for _ in range(2))
    cache = ReceiverCache(None, None)
    try:
        assert one.writer.handle == other.writer.handle
        assert kept != probe(name)["ephemeral"]  # else it goes if they are killed
        one.get_and_update_item((whole, []), "a")
        other.clear_cache()  # as vLLM does at its start
        assert other.is_cached_item("a")
        one.close()
        sent, updates = other.get_and_update_item(None, "a")
        assert [] == list(updates)
        assert same(whole, received(cache, sent))
        assert (0, 1) == (other.writer.stats().puts, other.writer.stats().adopted)
    finally:
        one.close()
        other.close()
    assert kept == (name in segments())
    if kept:
        with shmstore.ObjectStoreWriter.join(name) as again:
            assert 1 == again.recovered
            again.close(unlink=True)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SenderCache]]:
    """Two API servers of one store, which wait for each other for ever."""
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv(RUN, f"shmstore-{os.getpid()}-both")
    monkeypatch.setenv(WAIT, "inf")
    monkeypatch.setattr(sender_module, "_collector", ShmStoreCollector)
    made = [SenderCache(config(_api_process_count=2)) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def test_an_item_that_two_servers_miss_at_once_is_processed_by_one(servers: list[SenderCache]) -> None:
    one, other = servers
    asked = one.is_cached(["b", "a"])
    assert [False, False] == asked
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.is_cached, ["a", "b", "c"])
        one.get_and_update_item((item(*FIELDS), []), "b")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        one.get_and_update_item((item(*FIELDS), []), "a")
        assert [True, True, False] == waiting.result(60)
    one.invalidate("a")  # `other` has been handed it
    assert [] == list(other.get_and_update_item(None, "a")[1])
    assert (2, 2) == (other.make_stats().hits, other.make_stats().total)


def test_the_claims_of_a_processor_that_fails_end_with_its_request(servers: list[SenderCache]) -> None:
    one, other = servers

    def process() -> None:
        mm_is_cached = {"image": one.is_cached(["a"])}
        raise AssertionError(mm_is_cached)

    async def request() -> None:
        with pytest.raises(AssertionError):
            await make_async(process)()

    asyncio.run(request())
    gc.collect()
    assert not other.writer.claimed("a")


@pytest.mark.parametrize(("value", "seconds"), [(None, 1.0), ("0", 0.0), ("2.5", 2.5)])
def test_it_waits_as_long_as_the_setting_says(
    value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    if value is not None:
        monkeypatch.setenv(WAIT, value)
    cache, waits = SenderCache(config()), list[float]()

    def begin(mm_hashes: list[str], *, wait: float) -> list[None]:
        waits.append(wait)
        return [None]

    monkeypatch.setattr(cache._sender, "begin", begin)
    assert [False] == cache.is_cached(["a"])
    cache.close()
    assert [seconds] == waits


def test_on_the_thread_of_an_event_loop_nobody_waits(servers: list[SenderCache]) -> None:
    one, other = servers

    async def both() -> list[list[bool]]:
        kept = [cache.is_cached(["a"]) for cache in servers]
        assert other.writer.claimed("a")
        return kept

    assert [[False], [False]] == asyncio.run(both())
    assert not one.writer.claimed("a")


def test_processes_of_one_server_know_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (RUN, STORE, HANDLE):
        monkeypatch.setenv(variable, "of the process that started this one")
    monkeypatch.delenv(STORE)
    shared.agree.cache_clear()
    monkeypatch.setattr(multiprocessing, "parent_process", os.getpid)
    shared.agree()
    assert "of the process that started this one" == shared.store_name() == os.environ[HANDLE]
    shared.agree.cache_clear()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    shared.agree()
    chosen = shared.store_name()
    shared.agree()
    assert chosen == shared.store_name() != "of the process that started this one"
    assert HANDLE not in os.environ
    monkeypatch.setenv(STORE, "mine")
    assert "mine" == shared.store_name()


def test_a_worker_that_is_older_than_its_store_attaches_when_it_gets_a_reference(
    sender: SenderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HANDLE)
    monkeypatch.setenv(RUN, "not-there-yet")
    cache = ReceiverCache(None, None)
    whole = item(*FIELDS)
    assert whole is received(cache, whole)
    monkeypatch.setenv(RUN, sender.writer.name)
    assert same(whole, received(cache, sender.get_and_update_item((whole, []), "a")[0]))


def test_a_touch_counts_as_a_use(sender: SenderCache) -> None:
    big = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(100 << 10), field=FIELDS[0])})  # 400 KiB
    for name in "ab":
        sender.get_and_update_item((big, []), name)
    sender.touch_sender_cache_item("a")
    sender.get_and_update_item((big, []), "c")
    assert sender.is_cached_item("a")


def test_what_was_found_stays_until_it_is_taken(sender: SenderCache) -> None:
    big = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(100 << 10), field=FIELDS[0])})  # 400 KiB
    sender.get_and_update_item((big, []), "a")
    assert sender.is_cached_item("a")
    for name in "bcde":  # each of them is let go at once, and two fit
        sender.get_and_update_item((big, []), name)
    assert sender.get_and_update_item(None, "a")[1] == []
    assert sender.is_cached_item("e")
    sender.release_sender_touches()
    for name in "fghi":
        sender.get_and_update_item((big, []), name)
    assert not sender.is_cached_item("e")


def test_an_item_that_a_request_has_twice_is_found_and_taken_twice(sender: SenderCache) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    assert [True, True] == sender.is_cached(["a", "a"])
    assert 2 == sender.writer.stats().open_leases
    sent = [sender.get_and_update_item(None, "a")[0] for _ in range(3)]
    assert 3 == sender.writer.stats().open_leases
    assert (3, 4) == (sender.make_stats().hits, sender.make_stats().total)
    assert sender.is_cached_item("a")
    sender.release_sender_touches()
    assert 3 == len({ref_of(one) for one in sent}) == sender.writer.stats().open_leases


def test_what_is_evicted_before_it_is_taken_counts_as_absent(
    sender: SenderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    sender.invalidate("a")
    monkeypatch.setattr(sender._sender, "is_cached_item", lambda mm_hash: True)  # as it was a moment ago
    assert not sender.is_cached_item("a")


def test_what_cannot_be_handed_out_counts_as_absent(sender: SenderCache) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    kept = []
    while sender.is_cached_item("a"):
        kept.append(sender.get_and_update_item(None, "a"))
    assert len(kept) == sender.writer.stats().open_leases


def test_the_store_shows_beside_the_metrics_of_the_process(sender: SenderCache) -> None:
    assert f'"{sender.writer.name}"' in generate_latest(REGISTRY).decode()
    sender_module._collector.__wrapped__()  # of an application that shows them by a collector of its own


def test_what_cannot_be_stored_is_sent_inline(sender: SenderCache, caplog: pytest.LogCaptureFixture) -> None:
    class OtherField(MultiModalBatchedField):  # type: ignore[misc]
        pass

    OtherField.__name__ = MultiModalBatchedField.__name__
    large = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(1 << 20), field=FIELDS[0])})
    for given in (item(OtherField()), item(OtherField()), large):
        assert given is sender.get_and_update_item((given, ["update"]), "a")[0]
        assert given is received(ReceiverCache(None, None), given)
        assert not sender.is_cached_item("a")
    assert 1 == len([record for record in caplog.records if record.name == "vllm.shmstore"])


def test_a_reference_that_comes_from_outside_gets_a_lease_if_it_is_one_to_its_item(sender: SenderCache) -> None:
    whole = item(*FIELDS)
    came, other = (pickle.loads(pickle.dumps(sender.get_and_update_item((whole, []), name)[0])) for name in "ab")
    assert 0 == sender.writer.stats().open_leases
    for wrong in (other, {"address": MultiModalFieldElem(data=[1, 2, 3, 4, 5], field=FIELDS[0])}):
        with pytest.raises(ValueError):  # noqa: PT011
            sender.validate_input_item(wrong, "a")
    sender.validate_input_item(whole, "a")
    assert 0 == sender.writer.stats().open_leases
    sender.validate_input_item(came, "a")
    assert 1 == sender.writer.stats().open_leases
    assert same(whole, received(ReceiverCache(None, None), came))
    assert came._lease.ref == ref_of(came) == ref_of(pickle.loads(pickle.dumps(came)))
    del came
    assert 0 == sender.writer.stats().open_leases
    kept = sender.get_and_update_item(None, "b")[0]
    sender.invalidate("b")
    assert same(whole, received(ReceiverCache(None, None), kept))
    assert not sender.is_cached_item("b")
    with pytest.raises(ValueError):  # noqa: PT011
        sender.validate_input_item(other, "b")


def test_clear_and_close_forget_everything(sender: SenderCache) -> None:
    sent, _ = sender.get_and_update_item((item(*FIELDS), []), "a")
    sender.clear_cache()
    assert not sender.is_cached_item("a")
    assert (0, 0) == (sender.make_stats().hits, sender.make_stats().total)
    name = sender.writer.name
    sender.close()
    assert name not in segments()
    del sent  # late
