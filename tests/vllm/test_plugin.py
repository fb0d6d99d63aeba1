"""The plug-in without an engine: its switches, items, and prompt updates."""

from __future__ import annotations

import pickle
from inspect import unwrap
from typing import Any

import pytest
import torch
from vllm.multimodal.cache import factories
from vllm.multimodal.inputs import (
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import shmstore
from shmstore.integrations.vllm import items, register, seams
from shmstore.integrations.vllm.items import ReferenceItem, ref_of, register_items
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.sender import SenderCache
from shmstore.integrations.vllm.shared import SHARE_UUIDS, WAIT
from shmstore.integrations.vllm.updates import decode_updates, encode_updates
from tests.vllm.parts import FIELDS, item, plain, processor, prompt_updates, same


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


def test_the_factories_find_the_classes_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OutputProcessor, "_shmstore_leases", raising=False)
    register()
    assert not hasattr(OutputProcessor, "_shmstore_leases")  # a server without a sender cache pays nothing
    of_renderer = ((BaseRenderer, f"_process_{of}") for of in ("multimodal", "mm_uuids"))
    names = ((factories, "_get_cache_type"), (ProcessorInputs, "get_mm_hashes"), *of_renderer)
    before = [getattr(holder, name) for holder, name in names]
    assert all(hasattr(method, "__wrapped__") for method in before)
    register()
    assert before == [getattr(holder, name) for holder, name in names]
    assert (SenderCache, ReceiverCache) == (
        factories.ShmObjectStoreSenderCache,
        factories.ShmObjectStoreReceiverCache,
    )


def test_hashes_of_names_stay_as_they_are_if_all_servers_share_names(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = unwrap(ProcessorInputs.get_mm_hashes)
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", theirs)
    monkeypatch.setenv(SHARE_UUIDS, "1")
    register()
    assert theirs is ProcessorInputs.get_mm_hashes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"SHMSTORE_VLLM{of}", "perhaps") for of in ("", "_READ", "_WAIT", "_SHARE_UUIDS")),
        (WAIT, "-1"),
        (WAIT, "nan"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        register()


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


def test_prompt_updates_come_back_with_the_answers_of_their_functions() -> None:
    packed = encode_updates(prompt_updates())
    assert packed is not None
    updates = decode_updates(packed)
    assert plain(prompt_updates()) == plain(updates)
    assert updates[0].with_content([1]).content.full == [1]
    at_start = processor.PromptIndexTargets.start()
    for odd in (prompt_updates()[0].with_target(at_start), "update"):
        assert encode_updates([odd]) is None
