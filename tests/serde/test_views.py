"""How long views keep the payload alive, and what of the rest of the interface there is: types, layouts, pickle."""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import cffi
import numpy as np
import pytest
import torch

from shmstore.errors import (
    CorruptStoreError,
    NestingError,
    ObjectTooLargeError,
    UnknownTypeError,
    UnsupportedValueError,
)
from shmstore.serde import ALIGNMENT, PickleSerde, TensorSpec, register_type, registry
from tests.serde.values import SERDE, aligned, exact, round_trip, store
from tests.support import raises


def decoded_and_watched(value: Any, path: Callable[[Any], Any], copy: bool = False) -> tuple[Any, weakref.ref[Any]]:
    encoded = SERDE.encode(value)
    payload = store(encoded)
    gone = weakref.ref(payload)
    # A ctypes array made by from_buffer ends with its last reference; what torch and numpy keep is this object.
    back = path(SERDE.decode(encoded.meta, payload, copy=copy))
    return back, gone


@pytest.mark.parametrize(
    "value", [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), np.ones(4)], ids=["t", "bf16", "a"]
)
def test_the_buffer_objects_of_cffi_are_pinned_too(value: Any) -> None:
    ffi = cffi.FFI()
    encoded = SERDE.encode(value)
    memory = store(encoded)
    payload = ffi.buffer(ffi.from_buffer(memory))
    gone = weakref.ref(payload)
    back = SERDE.decode(encoded.meta, payload)
    del payload
    assert exact(back) == exact(value)
    part = back[1:]
    del back
    assert gone() is not None
    del part
    assert gone() is None


@pytest.mark.parametrize(
    "value", [torch.ones(3), np.ones(3), torch.ones(3, dtype=torch.bfloat16), [torch.ones(2), np.ones(1)]]
)
def test_private_copies_keep_nothing_and_are_writable(value: Any) -> None:
    back, gone = decoded_and_watched(value, lambda v: v, copy=True)
    assert gone() is None
    for leaf in back if isinstance(back, list) else [back]:
        leaf[...] = 2
        assert float(leaf.reshape(-1)[0]) == 2
    assert exact(value) != exact(back)


def test_views_show_the_payload_itself() -> None:
    encoded = SERDE.encode([torch.zeros(4, dtype=torch.uint8), np.zeros(4, np.uint8)])
    payload = store(encoded)
    tensor, array = SERDE.decode(encoded.meta, payload)
    payload[0], payload[ALIGNMENT] = 7, 9
    assert (int(tensor[0]), int(array[0])) == (7, 9)


def test_arrays_cannot_be_written_to() -> None:
    for value in (np.zeros(3), np.zeros(3, "M8[s]"), np.zeros(0), np.zeros(2, "<f4,<i8"), np.zeros((2, 3)).T):
        back = round_trip(value)
        assert back.flags.writeable is False
        with pytest.raises(ValueError, match="read-only"):
            back[...] = value
        for array in (back, back[:1], back.reshape(-1)) if back.size else ():
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True


# ---- registered types


@dataclasses.dataclass
class Field:
    key: str
    data: torch.Tensor


class Node:
    def __init__(self, *children: object) -> None:
        self.children = children


class Flawed:
    pass


class Impostor:
    pass


class Derived(Field):
    pass


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "BY_CLASS", registry.BY_CLASS)
    tables: Any = (registry.BY_CLASS, registry.BY_NAME)
    before = [dict(table) for table in tables]
    register_type("t.Field", Field, lambda f: (f.key, f.data), lambda tree: Field(*tree))
    register_type("t.Node", Node, lambda n: list(n.children), lambda tree: Node(*tree))
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def forget_plans() -> None:
    from shmstore.serde import msgpack_serde

    for plans in msgpack_serde._PLANS.values():
        plans.clear()


@pytest.mark.usefixtures("registered")
def test_a_registered_type_comes_back_with_its_tensors_out_of_band() -> None:
    field = Field("pixel_values", torch.randn(100, 100))
    encoded = SERDE.encode({"a": [Node(field, 1), (field,)]})
    assert [span[2] for span in encoded.spans] == [field.data.data_ptr()] * 2
    assert len(encoded.meta) < 120
    back = SERDE.decode(encoded.meta, store(encoded))
    node, (other,) = back["a"]
    assert (type(node), type(other)) == (Node, Field)
    assert (node.children[0].key, node.children[1]) == ("pixel_values", 1)
    assert exact(node.children[0].data) == exact(field.data)
    assert exact(other.data) == exact(field.data)


@pytest.mark.usefixtures("registered")
def test_the_path_leads_through_registered_types() -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        SERDE.encode({"a": [Node(1, Field("x", cast(Any, {1})))]})
    assert caught.value.path == "value['a'][0]<Node>[1]<Field>[1]"


@pytest.mark.usefixtures("registered")
def test_a_subclass_of_a_registered_type_is_refused() -> None:
    with raises(UnsupportedValueError, names=["no serializer for Derived"]):
        SERDE.encode(Derived("a", torch.zeros(1)))


def test_an_unregistered_name_is_a_typed_error_that_names_the_type(registered: None) -> None:
    encoded = SERDE.encode([Field("k", torch.zeros(2))])
    payload = store(encoded)
    forget_plans()
    del registry.BY_NAME["t.Field"]
    for _ in range(2):
        with raises(UnknownTypeError, names=["'t.Field'"], hint=["register_type"]) as caught:
            SERDE.decode(encoded.meta, payload)
        assert caught.value.type_name == "t.Field"
        assert isinstance(caught.value, CorruptStoreError)


@pytest.mark.usefixtures("registered")
def test_a_from_tree_that_fails_or_lies_is_reported_as_corruption() -> None:
    register_type("t.Flawed", Flawed, lambda f: 1, lambda tree: tree["x"])
    register_type("t.Impostor", Impostor, lambda f: 1, lambda tree: cast(Any, Flawed()))
    for value, names in ((Flawed(), ("'t.Flawed'", "TypeError")), (Impostor(), ("'t.Impostor'", "Flawed"))):
        with raises(CorruptStoreError, ("from_tree", *names)):
            round_trip(value)


@pytest.mark.usefixtures("registered")
def test_names_and_classes_are_registered_once() -> None:
    def to_tree(f: object) -> int:
        return 1

    from_tree: Any = Flawed
    register_type("t.Flawed", Flawed, to_tree, from_tree)
    register_type("t.Flawed", Flawed, to_tree, from_tree)
    for name, cls, named in (
        ("t.Flawed", Impostor, "'t.Flawed'"),
        ("t.Other", Flawed, "'t.Flawed'"),
        ("t.Tensor", torch.Tensor, "Tensor"),
        ("t.dict", dict, "dict"),
    ):
        with raises(ValueError, names=[named]):
            register_type(name, cast(Any, cls), to_tree, from_tree)
    assert "t.Other" not in registry.BY_NAME
    wrong: list[tuple[tuple[Any, ...], tuple[str, str]]] = [
        ((1, Impostor, to_tree, Flawed), ("name", "1")),
        (("", Impostor, to_tree, Flawed), ("name", "''")),
        (("t.I", 1, to_tree, Flawed), ("cls", "1")),
        (("t.I", Impostor, None, Flawed), ("to_tree", "None")),
        (("t.I", Impostor, to_tree, None), ("from_tree", "None")),
    ]
    for arguments, names in wrong:
        with raises(TypeError, names):
            register_type(*arguments)


# ---- layouts


def test_a_layout_gives_writable_views_whose_bytes_decode_reads() -> None:
    template = {
        "p": TensorSpec((2, 3), torch.bfloat16),
        "q": [TensorSpec([4], np.float32), TensorSpec((), ">i8"), torch.empty(2, 2, device="meta")],
        "r": (torch.zeros(3, 2).t(), np.zeros((2, 3)).T, "kept", 10**30),
        "e": TensorSpec((0, 3), torch.int8),
    }
    layout = SERDE.layout(template)
    payload = aligned(layout.nbytes)
    views = layout.build(payload)
    leaves = [views["p"], *views["q"], *views["r"][:2]]
    for n, leaf in enumerate(leaves):
        leaf[...] = n + 1
    back = SERDE.decode(layout.meta, payload)
    assert exact(back) == exact(views)
    assert [float(leaf.reshape(-1)[-1]) for leaf in [back["p"], *back["q"], *back["r"][:2]]] == [1, 2, 3, 4, 5, 6]
    assert [(type(leaf), leaf.dtype, tuple(leaf.shape)) for leaf in leaves] == [
        (torch.Tensor, torch.bfloat16, (2, 3)),
        (np.ndarray, np.dtype("f4"), (4,)),
        (np.ndarray, np.dtype(">i8"), ()),
        (torch.Tensor, torch.float32, (2, 2)),
        (torch.Tensor, torch.float32, (2, 3)),
        (np.ndarray, np.dtype("f8"), (3, 2)),
    ]
    assert back["r"][2:] == ("kept", 10**30)
    assert tuple(back["e"].shape) == (0, 3)


def test_a_layout_is_that_of_a_value_of_the_same_shapes() -> None:
    value = {"a": torch.randn(5, 7), "b": [np.zeros(9, np.int16), (torch.zeros(3, dtype=torch.bool),)]}
    encoded, layout = SERDE.encode(value), SERDE.layout(value)
    assert (layout.meta, layout.nbytes) == (encoded.meta, encoded.nbytes)


def test_the_views_of_a_layout_keep_its_buffer_and_do_not_show_the_templates_bytes() -> None:
    layout = SERDE.layout([torch.ones(4), np.ones(4)])
    payload = aligned(layout.nbytes, filler=0)
    gone = weakref.ref(payload)
    views = layout.build(payload)
    assert [float(view.sum()) for view in views] == [0, 0]
    del payload
    assert gone() is not None
    del views
    gc.collect()
    assert gone() is None


def test_a_layout_refuses_a_buffer_that_is_too_small() -> None:
    layout = SERDE.layout(TensorSpec((4,), torch.float32))
    with raises(ValueError, names=("payload", "16 bytes", "15")):
        layout.build(aligned(15))


def test_specs_are_checked_when_they_are_made() -> None:
    assert TensorSpec([2, np.int64(3)], "f4") == TensorSpec((2, 3), np.float32)
    assert hash(TensorSpec((2,), torch.int8)) == hash(TensorSpec((2,), torch.int8))
    with raises(ValueError, names=("shape", "(-1,)")):
        TensorSpec((-1,), torch.int8)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((1,), object),
        TensorSpec((1,), torch.qint8),
        TensorSpec((1,), ("f4", (2,))),
        TensorSpec([1] * 2000, torch.int8),
        TensorSpec([1] * 65, np.int8),
    ],
)
def test_a_spec_that_cannot_be_stored_is_refused_with_its_path(spec: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        SERDE.layout({"a": [spec]})
    assert caught.value.path == "value['a'][0]"


@pytest.mark.parametrize("shape", [(2**62, 2), (0, 2**70), (2**61,)])
def test_a_spec_beyond_every_store_is_too_large(shape: Any) -> None:
    for dtype in (torch.float64, np.float64):
        with pytest.raises(ObjectTooLargeError):
            SERDE.layout(TensorSpec(shape, dtype))


# ---- pickle


def test_pickle_says_what_it_cannot_store_and_what_is_damaged() -> None:
    serde = PickleSerde()
    with raises(UnsupportedValueError, names=("value", "pickle")):
        serde.encode(lambda: None)
    deep: list[Any] = []
    for _ in range(100000):
        deep = [deep]
    with pytest.raises(NestingError):
        serde.encode(deep)
    with raises(UnsupportedValueError, names=("PickleSerde", "template"), hint=["MsgpackSerde"]):
        serde.layout(torch.zeros(1))
    encoded = serde.encode([1, 2])
    for meta, payload in ((encoded.meta, b"short"), (encoded.meta, b"\xff" * 100), (b"", b""), (b"\x01", b"x")):
        with pytest.raises(CorruptStoreError):
            serde.decode(meta, payload)


def test_dlpack_says_what_is_read_only_where_it_can() -> None:
    """Of a tensor torch tells numpy nothing, before 2.15 not even if it is asked to."""
    arrays = [np.from_dlpack(round_trip(np.ones(3))), np.from_dlpack(round_trip(torch.ones(3)))]
    assert [False, True] == [array.flags.writeable for array in arrays]
    wrapper: Any = getattr(torch.utils.dlpack, "ReadOnlyTensorWrapper", None)
    if wrapper is not None:
        assert not np.from_dlpack(wrapper(round_trip(torch.ones(3)))).flags.writeable
