"""The parts of the plug-in, without an engine: its switches, its look at vLLM, items, and the leases of requests."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache import ShmObjectStoreSenderCache, factories
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import shmstore
from shmstore.integrations.vllm import register, seams
from shmstore.integrations.vllm.items import ReferenceItem, ref_of, register_items
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import RequestLeases, follow
from shmstore.integrations.vllm.sender import SenderCache

FIELDS = [
    MultiModalBatchedField(),
    MultiModalBatchedField(keep_on_cpu=True),
    MultiModalSharedField(batch_size=3),
    MultiModalFlatField(slices=[slice(0, 4), slice(4, 9)], dim=1),
    MultiModalFlatField(slices=[[slice(0, 4), slice(6, None)], [slice(4, 6, 1)]]),
]


# ---- switches


def plugged() -> bool:
    return (SenderCache, ReceiverCache) == (factories.ShmObjectStoreSenderCache, factories.ShmObjectStoreReceiverCache)


@pytest.mark.parametrize(("wanted", "comes"), [(None, True), ("1", True), ("strict", True), ("0", False)])
def test_the_environment_says_whether_the_plugin_comes(wanted: str | None, comes: bool) -> None:
    program = (
        "import vllm.plugins as p; p.load_general_plugins(); import tests.vllm.test_plugin as t; print(t.plugged())"
    )
    setting = {} if wanted is None else {"SHMSTORE_VLLM": wanted}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment() | setting, capture_output=True, text=True, check=True
    )
    assert str(comes) == done.stdout.split()[-1]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "SHMSTORE_VLLM"}


@pytest.mark.parametrize("name", ["SHMSTORE_VLLM", "SHMSTORE_VLLM_READ"])
def test_a_setting_that_means_nothing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ValueError, match=name):
        register()


# ---- a look at vLLM


def unknown_parameter(self: Any, mm_item: Any, mm_hash: str, priority: int) -> Any: ...


DIFFERENCES: list[tuple[Any, str, Any]] = [
    (SenderCache.__mro__[1], "get_and_update_item", unknown_parameter),
    (SenderCache.__mro__[1], "rotate", unknown_parameter),
    (ReceiverCache.__mro__[1], "rotate", unknown_parameter),
    (OutputProcessor, "add_request", unknown_parameter),
    (OutputProcessor, "process_outputs", unknown_parameter),
    (OutputProcessor, "__init__", unknown_parameter),
    (ShmObjectStoreSenderCache, "__init__", unknown_parameter),
    (factories, "processor_cache_from_config", unknown_parameter),
    (factories, "worker_receiver_cache_from_config", unknown_parameter),
    (seams, "MultiModalFieldElem", MultiModalFeatureSpec),
    (seams, "EngineCoreOutput", object),
]


def test_this_vllm_is_known() -> None:
    assert seams.difference() is None


@pytest.mark.parametrize(("where", "name", "other"), DIFFERENCES, ids=lambda value: getattr(value, "__name__", value))
def test_what_differs_keeps_the_plugin_out(
    where: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "install", lambda: pytest.fail("it was changed"))
    monkeypatch.setattr(where, name, other, raising=False)
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    register()
    assert 1 == len([record for record in caplog.records if record.name == "vllm.shmstore"])
    monkeypatch.setenv("SHMSTORE_VLLM", "strict")
    with pytest.raises(RuntimeError):
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


def test_a_reference_travels_as_vllms_messages_do() -> None:
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        ref = writer.put("item", b"")
        sent = ReferenceItem(SimpleNamespace(ref=ref), None)
        messages = MsgpackEncoder().encode(sent)
        arrived = MsgpackDecoder(MultiModalKwargsItem).decode(messages)
        assert [ref, ref, None] == [ref_of(arrived), ref_of(pickle.loads(pickle.dumps(sent))), ref_of(item(*FIELDS))]
    with pytest.raises(ValueError, match="not a reference"):
        ref_of({"address": MultiModalFieldElem(data=[1, 2], field=FIELDS[0])})


# ---- the leases of requests


class Lease:
    """Stands for a lease: its reference, and whether it is open."""

    def __init__(self, ref: shmstore.ObjectRef, opened: set[str], name: str) -> None:
        self.ref, self.opened, self.name = ref, opened, name
        opened.add(name)

    def __del__(self) -> None:
        self.opened.discard(self.name)


class Desk:
    """What `follow` needs of an `OutputProcessor`."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.opened: set[str] = set()
        self.ref = shmstore.ObjectRef(bytes(40))

    def request(self, name: str, *, children: int = 1) -> None:
        features = [SimpleNamespace(data=ReferenceItem(Lease(self.ref, self.opened, name), None))]
        for child in range(children):
            request_id = name if children == 1 else f"{child}_{name}"
            self.add_request(SimpleNamespace(request_id=request_id, mm_features=features))

    def output(self, name: str, *, finished: bool = False) -> None:
        self.process_outputs(
            [SimpleNamespace(request_id=name, new_token_ids=[1], pooling_output=None, finished=finished)]
        )

    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = request

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        return [request_id for request_id in request_ids if self.request_states.pop(request_id, None)]

    def process_outputs(self, engine_core_outputs: list[Any]) -> None:
        for output in engine_core_outputs:
            if output.finished or output.request_id in self.stopped:
                self.request_states.pop(output.request_id, None)

    stopped: tuple[str, ...] = ()


follow(Desk)


def test_a_lease_ends_when_the_core_has_finished_its_request() -> None:
    desk = Desk()
    desk.request("a")
    desk.output("a")
    assert {"a"} == desk.opened
    desk.output("a", finished=True)
    assert set() == desk.opened


def test_the_children_of_a_request_share_its_lease_until_the_last_has_ended() -> None:
    desk = Desk()
    desk.request("a", children=3)
    for child in (1, 0):
        desk.output(f"{child}_a", finished=True)
        assert {"a"} == desk.opened
    desk.output("2_a", finished=True)
    assert set() == desk.opened


def test_a_lease_of_an_aborted_request_lasts_until_a_later_one_has_a_token() -> None:
    desk = Desk()
    for name in "abc":
        desk.request(name)
    desk.abort_requests(["b"])
    desk.output("a")
    desk.output("c")  # both were there before
    assert {"a", "b", "c"} == desk.opened
    desk.request("d")
    assert {"a", "b", "c", "d"} == desk.opened
    desk.output("d")
    assert {"a", "c", "d"} == desk.opened


def test_a_request_that_a_stop_string_ended_may_be_in_the_core_still() -> None:
    desk = Desk()
    desk.request("a")
    desk.stopped = ("a",)
    desk.output("a")
    assert {"a"} == desk.opened
    desk.request("b")
    desk.output("b", finished=True)
    assert set() == desk.opened


def test_an_item_that_nobody_has_sent_ends_its_lease() -> None:
    desk = Desk()
    sent = ReferenceItem(Lease(desk.ref, desk.opened, "a"), None)
    assert {"a"} == desk.opened
    del sent
    assert set() == desk.opened


def test_two_processors_know_nothing_of_each_other() -> None:
    one, other = Desk(), Desk()
    one.request("a")
    other.request("a")
    other.output("a", finished=True)
    assert ({"a"}, set()) == (one.opened, other.opened)
    gc.collect()
    assert isinstance(vars(one)["_shmstore_leases"], RequestLeases)
