"""Items, fields and positions: a batch is cut into items and joined again."""

import dataclasses
import pickle
from collections import namedtuple
from typing import Any, cast

import numpy as np
import pytest
import torch

from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
    ResolvedPromptUpdate,
)
from shmstore.multimodal.values.nested import nested_equal
from tests.multimodal.helpers import item
from tests.support import raises


def elems_of(field: MultiModalField, *data: Any) -> list[MultiModalFieldElem]:
    return [MultiModalFieldElem("image", "k", part, field) for part in data]


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).tolist()


# --- cutting and joining -------------------------------------------------------------------------------------------


def test_a_processors_output_is_cut_into_items_and_joined_to_the_same() -> None:
    inputs = {
        "pixels": torch.randn(3, 4, 5),
        "patches": torch.randn(9, 2),
        "frames": torch.randn(2, 6),
        "grid": torch.arange(7),
        "extra": torch.ones(3),
    }
    config = {
        "pixels": MultiModalFieldConfig.batched("image"),
        "patches": MultiModalFieldConfig.flat("image", [slice(0, 2), slice(2, 5), slice(5, 9)]),
        "grid": MultiModalFieldConfig.shared("image", 3),
        "frames": MultiModalFieldConfig.flat("video", [slice(0, 1), slice(1, 6)], dim=1),
        "absent": MultiModalFieldConfig.batched("image"),
    }
    items: Any = MultiModalKwargsItems.from_hf_inputs(inputs, config)
    assert {"image": 3, "video": 2} == {modality: len(row) for modality, row in items.items()}
    assert ["pixels", "patches", "grid"] == list(items["image"][1])
    assert torch.equal(inputs["patches"][2:5], items["image"][1]["patches"].data)
    assert torch.equal(inputs["frames"][:, 1:], items["video"][1]["frames"].data)
    joined = items.require_data().get_data()
    assert ["pixels", "patches", "grid", "frames"] == list(joined)
    for key, tensor in joined.items():
        assert bits(inputs[key]) == bits(tensor), key


@pytest.mark.parametrize(
    ("config", "data", "names"),
    [
        (
            MultiModalFieldConfig.flat("image", [slice(0, 3), slice(3, 7)]),
            torch.zeros(5, 2),
            ("slice 3:7", "item 1", "5"),
        ),
        (
            MultiModalFieldConfig.flat("image", [slice(0, 3), slice(3, 7)]),
            [1, 2, 3, 4, 5, 6],
            ("slice 3:7", "item 1", "6"),
        ),
        (MultiModalFieldConfig.flat("image", [slice(0, 2)], dim=3), torch.zeros(5, 2), ("dim", "2 dimensions", "3")),
        (MultiModalFieldConfig.flat("image", [slice(0, 0)]), torch.tensor(5), ("dim", "0 dimensions")),
        (
            MultiModalFieldConfig.flat("image", [slice(0, 9), (slice(0, 5), slice(1, 3))]),
            torch.zeros(9, 2),
            ("slice 1:3", "item 1", "2", "dimension 1"),
        ),
        (MultiModalFieldConfig.flat("image", [(slice(0, 1),) * 3]), torch.zeros(5, 2), ("item 0", "dimensions, 2")),
        (MultiModalFieldConfig.flat("image", [slice(0, 1)]), 5, ("flat data", "int")),
        (MultiModalFieldConfig.flat("image", [slice(0, 1)]), np.array(5), ("flat data", "ndarray")),
    ],
)
def test_data_that_is_shorter_than_its_slices_is_refused_and_not_cut_short(
    config: Any, data: Any, names: tuple[str, ...]
) -> None:
    with raises(ValueError, ("key 'patches'", *names)):
        MultiModalKwargsItems.from_hf_inputs({"patches": data}, {"patches": config})


def test_a_slice_to_the_end_or_counted_from_it_is_as_in_python() -> None:
    config = MultiModalFieldConfig.flat("image", [slice(None), slice(-2, None), slice(0, -1), slice(0, 3)])
    items: Any = MultiModalKwargsItems.from_hf_inputs({"k": torch.arange(3)}, {"k": config})["image"]
    assert [[0, 1, 2], [1, 2], [0, 1], [0, 1, 2]] == [item["k"].data.tolist() for item in items]


def test_batched_stacks_equal_shapes_and_lists_others() -> None:
    field = MultiModalBatchedField()
    a, b = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert [[1, 2], [3, 4]] == field.reduce_data(elems_of(field, a, b)).tolist()
    assert [[1, 2]] == field.reduce_data(elems_of(field, a)).tolist()
    ragged = field.reduce_data(elems_of(field, a, torch.tensor([5])))
    assert isinstance(ragged, list)
    assert [[1, 2], [5]] == [part.tolist() for part in ragged]
    other_dtype = field.reduce_data(elems_of(field, a, b.to(torch.int32)))
    assert isinstance(other_dtype, list)
    assert [None, None] == field.reduce_data(elems_of(field, None, None))


def test_flat_concatenates_where_the_other_dimensions_agree_and_lists_others() -> None:
    field = MultiModalFlatField([slice(0, 1), slice(1, 3)])
    assert [1, 2] == field.reduce_data(elems_of(field, torch.tensor(1), torch.tensor(2)))
    a, b = torch.zeros(1, 2), torch.ones(2, 2)
    assert [[0, 0], [1, 1], [1, 1]] == field.reduce_data(elems_of(field, a, b)).tolist()
    wide = torch.ones(1, 3)
    assert [(1, 2), (1, 3)] == [tuple(part.shape) for part in field.reduce_data(elems_of(field, a, wide))]
    nested = field.reduce_data(elems_of(field, [a, b], [wide]))
    assert [(1, 2), (2, 2), (1, 3)] == [tuple(part.shape) for part in nested]
    last = MultiModalFlatField([slice(0, 2), slice(2, 3)], dim=-1)
    assert (1, 5) == tuple(last.reduce_data(elems_of(last, a, wide)).shape)
    apart = last.reduce_data(elems_of(last, a, torch.ones(1, 1, 2)))
    assert isinstance(apart, list)


def test_equal_fields_have_equal_hashes() -> None:
    pairs = [
        (MultiModalFlatField([slice(0, 2)]), MultiModalFlatField((slice(np.int64(0), np.int64(2)),))),
        (MultiModalSharedField(2), MultiModalSharedField(2)),
        (MultiModalBatchedField(), MultiModalBatchedField()),
    ]
    assert all(a == b and hash(a) == hash(b) for a, b in pairs)


def test_flat_takes_several_slices_for_an_item_and_lists_of_tensors() -> None:
    data = torch.arange(12).reshape(3, 4)
    field = MultiModalFlatField([(slice(0, 2), slice(0, 2)), (slice(2, 3), slice(1, 4))])
    assert [[[0, 1], [4, 5]], [[9, 10, 11]]] == [e.data.tolist() for e in field.build_elems("image", "k", data)]
    flat = MultiModalFlatField([slice(0, 1), slice(1, 3)])
    assert [["x"], ["y", "z"]] == [e.data for e in flat.build_elems("image", "k", ["x", "y", "z"])]
    with raises(ValueError, names=("key 'k'", "tensor", "list")):
        field.build_elems("image", "k", ["x"])
    wrongs: list[Any] = [3, (3,), ()]
    for wrong in wrongs:
        with raises(TypeError, names=("slices", repr(wrong))):
            MultiModalFlatField([wrong])


def test_shared_repeats_the_data_and_is_reduced_to_the_first() -> None:
    field = MultiModalSharedField(2)
    data = torch.arange(3)
    elems = field.build_elems("image", "k", data)
    assert 2 == len(elems)
    assert field.reduce_data(elems) is data
    with raises(ValueError, names=("batch_size", "0")):
        MultiModalSharedField(0)


@pytest.mark.parametrize(
    "other", [MultiModalSharedField(1), MultiModalFlatField([slice(0, 1)]), MultiModalFlatField([slice(0, 1)], dim=1)]
)
def test_mixed_fields_are_not_reduced_together(other: MultiModalField) -> None:
    flat = MultiModalFlatField([slice(0, 1)])
    field = flat if other != flat else MultiModalBatchedField()
    mixed = [*elems_of(field, torch.zeros(1, 1)), *elems_of(other, torch.zeros(1, 1))]
    with raises(ValueError, names=("'k'", type(field).__name__, type(other).__name__)):
        field.reduce_data(mixed)
    with raises(ValueError, names=["elems"]):
        field.reduce_data([])


def test_get_data_moves_each_tensor_of_a_tree_to_the_device_and_keeps_its_kind() -> None:
    Pair = namedtuple("Pair", "first second")
    data = Pair({"a": torch.zeros(2), "n": 5}, [(torch.zeros(3),)])
    moved = MultiModalSharedField(1).reduce_data(elems_of(MultiModalSharedField(1), data), device="meta")
    assert (Pair, dict, 5) == (type(moved), type(moved.first), moved.first["n"])
    assert ["meta", "meta"] == [moved.first["a"].device.type, moved.second[0][0].device.type]


# --- items ---------------------------------------------------------------------------------------------------------


def test_an_item_has_one_modality_and_is_not_empty() -> None:
    batched = MultiModalBatchedField()
    a = MultiModalFieldElem("image", "a", torch.zeros(1), batched)
    b = MultiModalFieldElem("audio", "b", torch.zeros(1), batched)
    with raises(ValueError, names=("modality", "'audio', 'image'")):
        MultiModalKwargsItem.from_elems([a, b])
    with raises(ValueError, names=("modality", "none")):
        MultiModalKwargsItem.from_elems([])
    with raises(ValueError, names=("modality", "none")):
        MultiModalKwargsItem({})
    with raises(ValueError, names=("elems", "'a'")):
        MultiModalKwargsItem.from_elems([a, a])
    with raises(ValueError, names=("elems['b']", "'a'")):
        MultiModalKwargsItem({"b": a})
    one = MultiModalKwargsItem({"a": a})
    assert ("image", {"a": a}, {"a": a.data}) == (one.modality, dict(one), one.get_data())


def test_items_are_grouped_by_modality_and_an_absent_one_is_told() -> None:
    audio = MultiModalKwargsItem.dummy("audio")
    a, b = item(1), item(2)
    items = MultiModalKwargsItems.from_seq([a, audio, b])
    assert {"image": [a, b], "audio": [audio]} == dict(items)
    assert items is items.require_data()
    holes = MultiModalKwargsItems({"image": [a, None]})
    for ask in (holes.require_data, holes.get_data):
        with raises(ValueError, names=("item 1", "'image'", "None")):
            ask()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), torch.ones(2), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.arange(4).reshape(2, 2).T, torch.arange(4).reshape(2, 2).T.contiguous(), True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (np.arange(2), torch.arange(2), False),
        (np.arange(2), np.arange(2).astype(np.int32), False),
        (np.arange(0), np.arange(0), True),
        ([torch.zeros(1)], [torch.zeros(1)], True),
        ([torch.zeros(1)], (torch.zeros(1),), False),
        ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)], False),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, False),
        (1, True, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
    ],
)
def test_equality_compares_kind_dtype_shape_and_bits(a: Any, b: Any, same: bool) -> None:
    assert same == nested_equal(a, b)
    field = MultiModalBatchedField()
    one, other = (MultiModalKwargsItem.from_elems(elems_of(field, part)) for part in (a, b))
    assert same == (one == other)


def test_equality_of_items_sees_modality_key_and_field() -> None:
    data = torch.zeros(1)
    base = MultiModalFieldElem("image", "k", data, MultiModalBatchedField())
    changes = ({"modality": "audio"}, {"key": "q"}, {"field": MultiModalSharedField(1)})
    assert base == dataclasses.replace(base)
    assert [False] * 3 == [base == dataclasses.replace(base, **change) for change in changes]
    assert MultiModalKwargsItems.from_seq([item(1)]) == MultiModalKwargsItems.from_seq([item(1)])
    assert MultiModalKwargsItems.from_seq([item(1)]) != MultiModalKwargsItems.from_seq([item(1, 2)])
    assert MultiModalFlatField([slice(0, 1)]) != MultiModalFlatField([slice(0, 2)])
    assert MultiModalFlatField([slice(0, 1)]) != MultiModalFlatField([slice(0, 1)], 1)


# --- positions and prompt updates ----------------------------------------------------------------------------------


def test_what_is_done_to_a_row_changes_no_items() -> None:
    mine = item(3)
    items: Any = MultiModalKwargsItems.from_seq([mine])
    items["image"].append(None)
    items["image"][0] = None
    for row in items.values():
        row.clear()
    assert [mine] == items["image"]


def test_a_placeholder_without_mask_is_all_embeddings() -> None:
    place = PlaceholderRange(2, 5)
    assert (5, (1, 4), [(2, 6)]) == (
        place.get_num_embeds(),
        place.get_embeds_indices_in_range(1, 4),
        place.extract_embeds_range(),
    )
    assert [] == PlaceholderRange(2, 0).extract_embeds_range()


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        ([0, 1, 0, 1, 1], [(3, 3), (5, 6)]),
        ([1, 1, 0, 0, 1], [(2, 3), (6, 6)]),
        ([1, 1, 1, 1, 1], [(2, 6)]),
        ([0, 0, 0, 0, 0], []),
    ],
)
def test_a_mask_says_which_placeholders_are_embeddings(mask: list[int], runs: list[tuple[int, int]]) -> None:
    place = PlaceholderRange(2, 5, torch.tensor(mask, dtype=torch.bool))
    assert runs == place.extract_embeds_range()
    assert sum(mask) == place.get_num_embeds()
    for start in range(6):
        for end in range(start, 6):
            expected = (sum(mask[:start]), sum(mask[:end]))
            assert expected == place.get_embeds_indices_in_range(start, end)


def test_embeddings_are_counted_once_and_the_counts_do_not_travel() -> None:
    place = PlaceholderRange(2, 5, torch.tensor([False, True, False, True, True]))
    packed = pickle.dumps(place)
    assert [0, 1, 1, 2, 3] == place.embeds_cumsum
    assert place.embeds_cumsum is place.embeds_cumsum
    assert packed == pickle.dumps(place)
    assert place == pickle.loads(packed)


def test_a_placeholder_is_checked_and_compared() -> None:
    mask = torch.tensor([True, False])
    with raises(ValueError, names=("is_embed", "(3,)", "(2,)")):
        PlaceholderRange(0, 3, mask)
    with raises(ValueError, names=("offset", "-1")):
        PlaceholderRange(-1, 3)
    with raises(ValueError, names=("length", "-3")):
        PlaceholderRange(1, -3)
    for name, wrong in (
        ("offset", ("0", 4)),
        ("offset", (True, 4)),
        ("length", (0, 4.0)),
        ("is_embed", (0, 4, "1111")),
    ):
        with raises(TypeError, names=[name]):
            PlaceholderRange(*wrong)
    with raises(ValueError, names=("start_idx", "end_idx", "3", "1", "4")):
        PlaceholderRange(0, 3).get_embeds_indices_in_range(1, 4)
    assert PlaceholderRange(0, 2, mask) == PlaceholderRange(0, 2, mask.clone())
    assert PlaceholderRange(0, 2, mask) != PlaceholderRange(0, 2)
    assert 1 == len({PlaceholderRange(0, 2, mask), PlaceholderRange(0, 2, mask.clone())})


def test_a_prompt_update_takes_the_callers_index() -> None:
    stored = ResolvedPromptUpdate("image", 0, "insert", "a", "b")
    assert ResolvedPromptUpdate("image", 3, "insert", "a", "b") == stored.with_item_idx(3)
    assert 0 == stored.item_idx
    with raises(ValueError, names=("mode", "'append'")):
        ResolvedPromptUpdate("image", 0, cast(Any, "append"), "a", "b")


@pytest.mark.parametrize("wrong", [MultiModalBatchedField(), "image"], ids=["a field", "a modality"])
def test_a_key_needs_a_configuration(wrong: Any) -> None:
    with raises(TypeError, ("config_by_key['px']", "MultiModalFieldConfig", type(wrong).__name__)):
        MultiModalKwargsItems.from_hf_inputs({"px": torch.zeros(2)}, {"px": wrong})


@pytest.mark.parametrize(
    "data", [torch.tensor(3), np.array(3), 3, {"a": 3}, "ab"], ids=["tensor", "array", "number", "dict", "text"]
)
def test_batched_data_without_a_first_dimension_is_an_error_that_names_the_key(data: Any) -> None:
    with raises(ValueError, names=("key 'px'", "batched data")):
        MultiModalKwargsItems.from_hf_inputs({"px": data}, {"px": MultiModalFieldConfig.batched("image")})
