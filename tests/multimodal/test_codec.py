"""Every multi-modal type goes through the store's own serializer and comes back equal."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmstore import CorruptStoreError, ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
)
from shmstore.multimodal.values import codec
from shmstore.multimodal.values.nested import nested_equal
from tests.multimodal.helpers import item, three_tensors, update
from tests.support import raises

Pair = tuple[ObjectStoreWriter, ObjectStoreReader]
FIELDS: list[MultiModalField] = [
    MultiModalBatchedField(),
    MultiModalSharedField(1),
    MultiModalSharedField(2**40),
    MultiModalFlatField([]),
    MultiModalFlatField([slice(0, 3), slice(3, None), slice(None, 9, 2)], dim=-1),
    MultiModalFlatField([slice(3, 9, 2)]),
    MultiModalFlatField([(slice(0, 1), slice(2, 3))]),
    MultiModalFlatField([(slice(0, 1), slice(2, 3)), slice(1, 2), (slice(4, 5),)], dim=1),
]


def elem(field: MultiModalField, data: object) -> MultiModalFieldElem:
    return MultiModalFieldElem("audio", "key", data, field)


VALUES = [
    *FIELDS,
    *(elem(field, torch.arange(3)) for field in FIELDS),
    *(MultiModalKwargsItem.from_elems([elem(field, [torch.zeros(2, 2), (None, "x")])]) for field in FIELDS),
    elem(FIELDS[0], None),
    MultiModalKwargsItem({"": MultiModalFieldElem("m\nn", "", torch.ones(2), FIELDS[1])}),
    MultiModalKwargsItem.from_elems([MultiModalFieldElem("m", key, torch.ones(2), FIELDS[0]) for key in ("", "b")]),
    MultiModalKwargsItem.from_elems([MultiModalFieldElem("m", f"k{n}", torch.ones(2), FIELDS[4]) for n in range(30)]),
    three_tensors(1000),
    MultiModalKwargsItem.dummy("image"),
    MultiModalKwargsItems.from_seq([item(3), three_tensors(9), MultiModalKwargsItem.dummy("video", 0)]),
    MultiModalKwargsItems({"image": [item(3), None], "audio": []}),
    MultiModalKwargsItems(),
    PlaceholderRange(3, 4),
    PlaceholderRange(3, 2, torch.tensor([True, False])),
    MultiModalFeatureSpec(item(4), "image", "hash", PlaceholderRange(0, 1)),
    MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(0, 2, torch.tensor([True, False]))),
    update("a"),
    [item(3), {"a": (item(4), update("b"))}],
]


@pytest.fixture(scope="module")
def store() -> Iterator[Pair]:
    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        with ObjectStoreReader.attach(writer.handle) as reader:
            yield writer, reader


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_comes_back_equals_what_went_in(store: Pair, value: Any, copy: bool) -> None:
    writer, reader = store
    ref = writer.put("key", value)
    try:
        got = reader.get(ref, copy=copy)
        assert type(value) is type(got)
        assert nested_equal(value, got)
    finally:
        del got
        writer.delete("key")


def test_a_feature_with_a_reference_in_it_is_not_stored(store: Pair) -> None:
    feature = MultiModalFeatureSpec(ObjectRef(bytes(40)), "image", "hash", PlaceholderRange(0, 1))
    with raises(TypeError, names=["ObjectRef"]):
        store[0].put("key", feature)


@pytest.mark.parametrize(("name", "wrong"), [("data", 5), ("mm_position", (0, 1))])
def test_a_feature_that_no_get_could_read_is_not_stored(store: Pair, name: str, wrong: Any) -> None:
    feature = MultiModalFeatureSpec(item(4), "image", "hash", PlaceholderRange(0, 1))
    setattr(feature, name, wrong)
    before = store[0].stats()
    with raises(TypeError, names=["MultiModalFeatureSpec", name, type(wrong).__name__]):
        store[0].put("key", feature)
    assert before == store[0].stats(), "nothing was allocated"


def test_a_field_of_ones_own_is_refused_before_anything_is_stored(store: Pair) -> None:
    class Own(MultiModalBatchedField):
        pass

    with raises(TypeError, names=["Own"]):
        store[0].put("key", MultiModalKwargsItem.from_elems([elem(Own(), torch.zeros(1))]))
    assert "key" not in store[0]


WRONG = [
    "text",
    {},
    {"a": 1},
    {"": "image"},
    {"": "b\nimage", "k": 1, "l": 2},
    {"": 5, "k": 1},
    {"": "x\nimage", "k": 1},
    {"": "sx\nimage", "k": 1},
    {"": "f0 1:2\nimage", "k": 1},
    [],
    ["b\nimage"],
    ["b\nimage", {"k": 1, "": 2}],
    [5, {"k": 1}],
]


@pytest.mark.parametrize("tree", WRONG, ids=repr)
def test_a_tree_of_another_version_is_an_error_and_not_an_item(
    store: Pair, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = store
    from shmstore.serde import registry

    old = registry.BY_CLASS[MultiModalKwargsItem]
    monkeypatch.setitem(registry.BY_CLASS, MultiModalKwargsItem, old._replace(to_tree=lambda _: tree))
    ref = writer.put("key", item(1))
    try:
        with pytest.raises(CorruptStoreError):
            reader.get(ref)
    finally:
        writer.delete("key")


def test_the_text_of_a_field_is_worked_out_once_for_all_items_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MultiModalField] = []
    to_text = codec._field_to_text

    def noted(field: MultiModalField) -> Any:
        made.append(field)
        return to_text(field)

    monkeypatch.setattr(codec, "_field_to_text", noted)
    field = MultiModalFlatField([slice(i, i + 1) for i in range(50)])
    items = [MultiModalKwargsItem.from_elems([elem]) for elem in field.build_elems("image", "k", torch.arange(50))]
    trees = [codec._item_to_tree(item) for item in items]
    assert [field] == made
    assert 1 == len({tree[""] for tree in trees})


def test_a_worker_parses_the_fields_of_items_from_many_batches_of_usual_size_once() -> None:
    def fields() -> Iterator[MultiModalKwargsItem]:
        for batch in range(200):
            field = MultiModalFlatField([slice(n * 1024 + batch, n * 1024 + batch + 1024) for n in range(64)])
            yield codec._item_from_tree(codec._item_to_tree(MultiModalKwargsItem.from_elems([elem(field, None)])))

    first, again = ([item["key"].field for item in fields()] for _ in range(2))
    assert all(a is b for a, b in zip(first, again, strict=True))
