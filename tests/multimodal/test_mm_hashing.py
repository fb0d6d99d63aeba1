"""`hash_item`: equal content, equal name; other content, other name."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from mm_helpers import item, three_tensors

from shmstore.multimodal import hash_item, hashing

DIFFERENT = [
    None,
    True,
    False,
    1,
    0,
    -1,
    2**70,
    1.0,
    -0.0,
    0.0,
    float("nan"),
    1 + 0j,
    "1",
    b"1",
    "",
    b"",
    [],
    (),
    {},
    [[]],
    ["ab"],
    ["a", "b"],
    ("a", "b"),
    [["a"], "b"],
    [["a", "b"]],
    ["aSb", "c"],
    ["a", "bSc"],
    {"a": "b"},
    {"a": {"b": None}},
    {"a": None, "b": None},
    {1: "b"},
    torch.zeros(2),
    torch.zeros(1, 2),
    torch.zeros(2, dtype=torch.int32),
    torch.zeros(4, dtype=torch.float16),
    torch.zeros(4, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.tensor(0.0),
    np.zeros(2, np.float32),
    np.zeros(2, ">f4"),
    np.zeros(2, [("a", "<f4")]),
    np.zeros(2, [("b", "<f4")]),
    np.float32(1.0),
    item(3),
    item(3, fill=2),
    three_tensors(8),
]


def test_no_two_different_values_have_one_hash():
    names = [hash_item(value) for value in DIFFERENT]
    assert len(DIFFERENT) == len(set(names))
    assert {64} == {len(name) for name in names}


@pytest.mark.parametrize("value", DIFFERENT, ids=lambda value: repr(value)[:30])
def test_the_hash_is_the_same_each_time(value):
    assert hash_item(value) == hash_item(value)


def test_the_hash_is_of_the_content_and_not_of_how_it_lies_in_memory():
    tensor = torch.arange(6).reshape(2, 3)
    assert hash_item(tensor.T.contiguous()) == hash_item(tensor.T)
    assert hash_item(tensor[:, 1:].clone()) == hash_item(tensor[:, 1:])
    assert hash_item(tensor.T) != hash_item(tensor.reshape(3, 2))
    array = np.arange(6).reshape(2, 3)
    assert hash_item(np.ascontiguousarray(array.T)) == hash_item(array.T)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert hash_item(torch.tensor([1 - 2j])) == hash_item(conjugate)
    assert hash_item(torch.ones(2)) == hash_item(torch.ones(2, requires_grad=True))
    assert hash_item({"a": 1, "b": 2}) == hash_item({"b": 2, "a": 1})
    assert hash_item(b"ab") == hash_item(memoryview(b"ab"))


def test_keyword_arguments_count_and_their_order_does_not():
    assert hash_item("x", size=1, crop=True) == hash_item("x", crop=True, size=1)
    different = [
        hash_item("x"),
        hash_item("x", size=1),
        hash_item("x", size=2),
        hash_item("x", crop=1),
        hash_item(["x", {"size": 1}]),
        hash_item({"x": 1}),
    ]
    assert len(different) == len(set(different))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, 2, object()]}, "value\\['a'\\]\\[2\\]: cannot hash object"),
        ([{1, 2}], "value\\[0\\]: cannot hash set"),
        (np.array([object()]), "value: cannot hash an array of objects"),
        (torch.zeros(2, device="meta"), "value: cannot hash a tensor that is sparse, quantised or without data"),
        (torch.eye(2).to_sparse(), "value: cannot hash a tensor that is sparse"),
        ({frozenset(): 1}, "value: cannot hash a key of frozenset"),
    ],
)
def test_what_cannot_be_hashed_is_named_by_its_path(value, path):
    with pytest.raises(TypeError, match=path):
        hash_item(value)
    with pytest.raises(TypeError, match="kwargs\\['k'\\]"):
        hash_item("x", k=object())


def test_another_process_comes_to_the_same_hash():
    value = "[torch.arange(9), {'b': 1, 'a': 's'}]"
    code = f"import torch; from shmstore.multimodal import hash_item; print(hash_item({value}, k=1))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert hash_item([torch.arange(9), {"a": "s", "b": 1}], k=1) == out.stdout.strip()


def test_blake3_is_taken_where_it_is_installed_and_sha256_elsewhere(monkeypatch):
    class Package:
        blake3 = hashlib.blake2s

    monkeypatch.setitem(sys.modules, "blake3", Package)
    assert hashing._new_hasher() is hashlib.blake2s
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert hashing._new_hasher() is hashlib.sha256


def test_images_are_hashed_by_what_a_processor_can_see():
    image_module = pytest.importorskip("PIL.Image", reason="Pillow comes with the demo extra")
    image = image_module.new("RGB", (4, 3), (1, 2, 3))
    turned = image.copy()
    turned.getexif()[0x0112] = 6
    palette = image_module.new("P", (4, 3))
    palette.putpalette([1, 2, 3] * 256)
    other_palette = palette.copy()
    other_palette.putpalette([3, 2, 1] * 256)
    different = [
        image,
        image_module.new("RGB", (3, 4), (1, 2, 3)),
        image_module.new("RGB", (4, 3), (1, 2, 4)),
        image_module.new("L", (4, 9)),
        turned,
        palette,
        other_palette,
        image.tobytes(),
    ]
    names = [hash_item(value) for value in different]
    assert len(different) == len(set(names))
    assert names[0] == hash_item(image.copy())
