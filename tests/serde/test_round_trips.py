"""MsgpackSerde: what comes back equals what went in, bit for bit, and nothing else is let in."""

import itertools
import math
import pickle
import struct
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shmstore.errors import NestingError, ObjectTooLargeError, UnsupportedValueError
from shmstore.serde import (
    ALIGNMENT,
    MsgpackSerde,
    ObjectSerde,
    PickleSerde,
    TensorSpec,
    encode,
    msgpack_serde,
    register_type,
)
from shmstore.serde.builtin_types import NUMPY_SCALARS
from shmstore.serde.decode import make_plan
from shmstore.serde.dtypes import MAX_NDIM, carrier_of
from shmstore.serde.tensors import KINDS, load_torch
from shmstore.serde.wire import MAX_DEPTH, MAX_NBYTES
from tests.serde.values import SERDE, aligned, exact, random_array, random_tensor, round_trip, store
from tests.support import raises


class Foo:
    pass


load_torch()
TORCH_DTYPES = sorted(KINDS, key=str)
NUMPY_DTYPES = [
    *("?", "i1", "<i2", ">i2", "<i4", "<i8", ">i8", "u1", "<u2", "<u4", ">u4", "<u8", "l", "q"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", "g", "<c8", ">c8", "<c16", "G"),
    *("S1", "S7", "<U3", ">U3", "V5", "M8", "M8[ns]", ">M8[3s]", "m8[D]", "m8[us]"),
]
STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", ">i8")]),
    np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    np.dtype([("xy", "<f4", (2, 3)), ("name", "<U4")]),
    np.dtype([("in", [("x", "u1"), ("y", "<M8[s]")]), ("z", "S3")]),
    np.dtype({"names": ["b", "a"], "formats": ["<i4", "<i2"], "offsets": [4, 0], "itemsize": 16}),
    np.dtype({"names": ["lo", "all"], "formats": ["<u4", "<u8"], "offsets": [0, 0]}),
    np.dtype([("é", "u1"), ("\ud800", "u1")]),
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (0, 3), (3, 0, 2), (1, 5, 1), (2, 1, 3, 4)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_tensor_of_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    for shape, copy in itertools.product(SHAPES, (False, True)):
        tensor = random_tensor(dtype, shape)
        back = round_trip(tensor, copy=copy)
        assert exact(back) == exact(tensor)
        assert type(back) is torch.Tensor
        assert back.is_contiguous()


def test_a_mapped_file_is_stored_as_an_array(tmp_path: Path) -> None:
    mapped: Any = np.memmap(tmp_path / "file", "<i4", "w+", shape=(6, 4))
    mapped[:] = np.arange(24).reshape(6, 4)
    for part in (mapped, mapped[::2, 1:3], np.memmap(tmp_path / "file", "<i4", "r")):
        back = round_trip({"a": [part]})["a"][0]
        assert type(back) is np.ndarray
        assert exact(back) == exact(np.asarray(part))


@pytest.mark.parametrize("dtype", [*map(np.dtype, NUMPY_DTYPES), *STRUCTURED], ids=str)
def test_an_array_of_every_dtype_and_shape_comes_back_bit_for_bit(dtype: Any) -> None:
    for shape, copy in itertools.product(SHAPES, (False, True)):
        array = random_array(dtype, shape)
        back = round_trip(array, copy=copy)
        assert exact(back) == exact(array)
        assert back.flags.writeable is copy


def test_no_dtype_of_this_torch_is_left_out_but_the_quantised() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype) for dtype in every - set(KINDS)} == {
        *("torch.qint8", "torch.qint32", "torch.quint8", "torch.quint4x2", "torch.quint2x4")
    }
    assert carrier_of("bcomplex32") == np.int32  # torch 2.15 has it, which CI has no build of
    assert {str(dtype): kind.itemsize for dtype, kind in KINDS.items()} == {
        f"torch.{kind.name}": kind.carrier.itemsize for kind in KINDS.values()
    }


@pytest.mark.parametrize("dtype", ["S0", "U0", "V0"])
def test_dtypes_without_bytes_keep_dtype_and_shape(dtype: Any) -> None:
    array = np.zeros(3, [("a", dtype)])["a"]
    assert exact(round_trip(array)) == exact(array)


# long and long long; a record without fields and a void.
@pytest.mark.parametrize(("first", "then"), [("q", "l"), ("Q", "L"), ((np.record, 4), "V4"), (">q", ">l")], ids=str)
def test_a_dtype_is_taken_or_refused_whatever_equal_one_came_before(
    monkeypatch: pytest.MonkeyPatch, first: Any, then: Any
) -> None:
    assert np.dtype(first) == np.dtype(then)
    monkeypatch.setattr(encode, "_NUMPY_WIRE", {})
    monkeypatch.setattr(msgpack_serde, "_ONE_ARRAY", {})
    array = np.arange(3).astype("S4" if "V4" == then else then).view(then)
    other = array.view(first)
    for _ in range(2):  # before the other one, and after it
        for value in (other, [other]):
            if "V4" == then:
                with pytest.raises(UnsupportedValueError):
                    SERDE.encode(value)
            else:
                assert exact(round_trip(value)) == exact(value)
        assert exact(round_trip([array, array[:2]])) == exact([array, array[:2]])
        assert exact(round_trip(array)) == exact(array)


def strided_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    complex_ = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    yield "transposed", base.t()
    yield "sliced", base[::2, 1::3]
    yield "offset", base[1:, 2:]
    yield "expanded", torch.arange(3).expand(4, 3)
    yield "channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "conj", complex_.conj()
    yield "conj transposed", complex_.t().conj()
    yield "conj 0-d", complex_[0, 0].conj()
    yield "neg", complex_.conj().imag
    yield "neg contiguous", torch._neg_view(torch.randn(3, 4))
    yield "neg conj", torch._neg_view(complex_).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        yield "conj half", complex_.to(torch.complex32).conj()
    yield "zero tensor", torch._efficientzerotensor((2, 3))
    yield "overlapping", torch.arange(6).as_strided((4, 3), (1, 1))
    yield "diagonal", torch.arange(16).reshape(4, 4).diagonal()
    yield "many dimensions strided", torch.arange(4).reshape(2, *[1] * (MAX_NDIM - 2), 2).transpose(0, -1)
    for dtype in TORCH_DTYPES:
        yield f"transposed {dtype}", random_tensor(dtype, (5, 3)).t()


STRIDED_TENSORS = dict(strided_tensors())


@pytest.mark.parametrize("name", STRIDED_TENSORS)
def test_a_strided_or_lazy_tensor_is_stored_as_what_it_shows(name: str) -> None:
    tensor = STRIDED_TENSORS[name]
    back = round_trip(tensor)
    if name == "zero tensor":
        assert exact(back) == exact(torch.zeros(2, 3))
    else:
        assert exact(back) == exact(tensor)
    assert (back.is_conj(), back.is_neg(), back.is_contiguous()) == (False, False, True)


@pytest.mark.parametrize(
    "lazy", [torch.zeros(2, 3, dtype=torch.complex64).add(1 + 2j).conj(), torch._neg_view(torch.ones(2))]
)
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"a": t}, lambda t: [t], lambda t: {"a": [t]}])
def test_the_lazy_bits_of_a_contiguous_tensor_are_seen_whatever_was_stored_before(
    lazy: torch.Tensor, wrap: Callable[[Any], Any]
) -> None:
    plain = torch.zeros(lazy.shape, dtype=lazy.dtype)
    for value in (plain, plain, lazy, lazy):
        assert lazy.is_contiguous()
        assert exact(round_trip(wrap(value))) == exact(wrap(value))


def strided_arrays() -> Iterator[tuple[str, NDArray[Any]]]:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    yield "fortran", np.asfortranarray(base)
    yield "reversed", base[::-1, ::-2]
    yield "broadcast", np.broadcast_to(np.arange(3), (4, 3))
    yield "sliced", base[1:, ::3]
    yield "field", random_array("<f8,<i4", (5,))["f1"]
    yield "reversed structured", random_array(np.dtype([("a", "i1"), ("b", "<i8")], align=True), (5,))[::-1]
    yield "reversed dates", random_array(">M8[s]", (5,))[::-2]
    yield "reversed text", random_array(">U3", (4, 2))[::-1].T
    yield "reversed void", random_array("V5", (4,))[::-1]
    yield "unaligned", np.ndarray((3,), "<f8", random_array("u1", (25,)), 1)


STRIDED_ARRAYS = dict(strided_arrays())


@pytest.mark.parametrize("name", STRIDED_ARRAYS)
def test_a_strided_array_is_stored_in_c_order(name: str) -> None:
    array = STRIDED_ARRAYS[name]
    back = round_trip(array)
    assert exact(back) == exact(array)
    assert back.flags.c_contiguous


def test_the_padding_of_structured_arrays_is_written_too_rather_than_left_as_found() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "<i8")], align=True)
    raw = np.arange(4 * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype)[::-1]
    payload = store(SERDE.encode(array))
    assert bytes(payload) == raw.reshape(4, -1)[::-1].tobytes()


def test_contiguous_leaves_become_spans_and_only_the_others_fills() -> None:
    contiguous, transposed = torch.zeros(4, 4), torch.zeros(4, 5).t()
    encoded = SERDE.encode([contiguous, transposed, np.zeros((2, 2)), np.zeros((2, 3)).T])
    assert encoded.spans[0][2] == contiguous.data_ptr()
    assert (len(encoded.spans), len(encoded.fills)) == (2, 2)
    assert encoded.fills[0][2] is transposed


def test_a_read_only_array_is_stored_without_a_copy() -> None:
    array = np.arange(9.0)
    array.setflags(write=False)
    assert SERDE.encode(array).spans[0][2] == array.ctypes.data
    assert exact(round_trip(array)) == exact(array)


@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda t: t.requires_grad_()], ids=["Parameter", "requires_grad"])
def test_what_requires_a_gradient_comes_back_as_a_plain_tensor(make: Callable[[Any], Any]) -> None:
    tensor = make(torch.randn(3, 4))
    for value in (tensor, tensor.t()):
        back = round_trip({"w": value, "n": 1})["w"]
        assert type(back) is torch.Tensor
        assert back.requires_grad is False
        assert exact(back) == exact(value)
        assert [source.requires_grad for _, _, source in SERDE.encode([value]).fills] in ([], [False])


SCALARS = [
    *("", "a", "é", "\ud800", "a\udfffb", "\0", "x" * 300, b"", b"\0\xff", True, False, None),
    *(0, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**100, -(10**100), 255 << 64, -128 << 64),
    *(0.0, -0.0, math.inf, -math.inf, 5e-324, 1.5),
    struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0],
    struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0],
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")[0],
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: repr(s)[:20])
def test_a_scalar_comes_back_exactly_alone_in_containers_and_as_a_key(scalar: Any) -> None:
    for value in (scalar, [scalar], (scalar,), {scalar: scalar}, {(scalar, (scalar,)): [torch.ones(1), scalar]}):
        assert exact(round_trip(value)) == exact(value)


@pytest.mark.parametrize("key", [Foo(), frozenset((1,)), (1, 1j), np.int64(1)], ids=lambda key: type(key).__name__)
def test_a_dict_key_that_is_no_scalar_is_refused(key: Any) -> None:
    with raises(UnsupportedValueError, names=["dict key"]):
        SERDE.encode({key: torch.ones(1)})


@pytest.mark.parametrize("scalar", NUMPY_SCALARS, ids=lambda s: s.__name__)
def test_numpy_scalars_come_back_exactly(scalar: Any) -> None:
    values = [scalar(0), scalar(1), *random_array(scalar, (5,))]
    for value in (*values, values, {"grid": (values[1], torch.ones(2))}):
        for copy in (False, True):
            assert exact(value) == exact(round_trip(value, copy=copy))


def test_a_torch_size_comes_back_as_one() -> None:
    assert exact([torch.Size([1, 2]), torch.Size([])]) == exact(round_trip([torch.Size([1, 2]), torch.Size([])]))


def test_containers_that_come_back_are_the_callers_own() -> None:
    encoded = SERDE.encode({"a": [1, 2], "b": {"c": 1}, "d": ([3],)})
    first = SERDE.decode(encoded.meta, b"")
    first["a"].append(3)
    first["b"]["c"] = 2
    first["d"][0].clear()
    first["e"] = 1
    assert SERDE.decode(encoded.meta, b"") == {"a": [1, 2], "b": {"c": 1}, "d": ([3],)}


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.builds(
        random_tensor,
        st.sampled_from(TORCH_DTYPES),
        st.lists(st.integers(0, 4), max_size=4).map(tuple),
        st.integers(0, 9),
    ),
    st.builds(
        lambda dtype, shape, seed: random_array(dtype, shape, seed),
        st.sampled_from(NUMPY_DTYPES),
        st.lists(st.integers(0, 4), max_size=4).map(tuple),
        st.integers(0, 9),
    ),
    st.sampled_from(sorted(STRIDED_ARRAYS)).map(lambda name: STRIDED_ARRAYS[name]),
    st.sampled_from(sorted({*STRIDED_TENSORS} - {"zero tensor"})).map(lambda name: STRIDED_TENSORS[name]),
)
scalar_keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)
)
keys = st.recursive(scalar_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(trees, st.booleans())
def test_any_tree_comes_back_equal_and_every_leaf_is_aligned_and_apart(value: Any, copy: bool) -> None:
    encoded = SERDE.encode(value)
    regions = sorted((offset, nbytes) for offset, nbytes, _ in [*encoded.spans, *encoded.fills])
    assert all(offset % ALIGNMENT == 0 for offset, _ in regions)
    ends = [0, *(offset + nbytes for offset, nbytes in regions)]
    assert all(end <= offset for end, (offset, _) in zip(ends, regions, strict=False))
    assert encoded.nbytes == ends[-1]
    back = SERDE.decode(encoded.meta, store(encoded), copy=copy)
    assert exact(back) == exact(value)
    again = SERDE.encode(value)
    assert (again.meta, again.nbytes) == (encoded.meta, encoded.nbytes)


def test_equal_shapes_of_different_dtype_or_kind_are_not_mixed_up_by_the_caches() -> None:
    for _ in range(2):
        for value in (torch.zeros(4), torch.zeros(4, dtype=torch.int32), np.zeros(4, np.float32), np.zeros(4, ">f4")):
            assert exact(round_trip(value)) == exact(value)
            assert exact(round_trip({"a": value})) == exact({"a": value})


def test_keys_that_compare_equal_are_not_mixed_up_by_the_caches() -> None:
    for _ in range(2):
        for key in (1, True, 1.0, "1", b"1"):
            assert exact(round_trip({key: torch.ones(2)})) == exact({key: torch.ones(2)})


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Any] = [
        msgpack_serde._ONE_TENSOR,
        msgpack_serde._ONE_ARRAY,
        msgpack_serde._FLAT,
        *msgpack_serde._PLANS.values(),
    ]
    for n in range(1, msgpack_serde._CACHE_ENTRIES + 100):
        for value in (torch.empty(n), np.empty(n), {"a": torch.empty(n)}):
            encoded = SERDE.encode(value)
            SERDE.decode(encoded.meta, bytearray(encoded.nbytes))
        assert all(len(cache) <= msgpack_serde._CACHE_ENTRIES for cache in caches)
    wide = {f"{n:09}": torch.ones(1) for n in range(1000)}
    before = len(msgpack_serde._FLAT)
    assert SERDE.encode(wide).meta == SERDE.encode(wide).meta
    assert before == len(msgpack_serde._FLAT)
    monkeypatch.setattr(encode, "_NUMPY_WIRE_LIMIT", len(encode._NUMPY_WIRE))
    SERDE.encode(np.empty(1, "S12345"))
    assert 1 == len(encode._NUMPY_WIRE)
    large = SERDE.encode([*range(5000)])
    SERDE.decode(large.meta, b"")
    assert large.meta not in msgpack_serde._VIEW_PLANS
    assert ("view", large.meta) not in msgpack_serde._LARGE_PLANS


def test_the_plans_of_many_tensors_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[bytes]()

    def counted(meta: bytes, mode: Any) -> Any:
        made.append(meta)
        return make_plan(meta, mode)

    monkeypatch.setattr(msgpack_serde, "make_plan", counted)
    leaves: list[Any] = [torch.ones(2), np.ones(2)]
    value = {f"model.layers.{n}.self_attn.q_proj.weight": leaves[n % 2] for n in range(200)}
    for _ in range(3):
        assert exact(round_trip(value)) == exact(value)
    assert 1 == len(made)
    for n in range(200, 200 + 2 * msgpack_serde._LARGE_ENTRIES):
        round_trip({**value, f"{n}": torch.ones(n)})
        assert len(msgpack_serde._LARGE_PLANS) <= msgpack_serde._LARGE_ENTRIES
    too_large = [*value.values()] * 30
    for _ in range(2):
        round_trip(too_large)
    assert 2 == made.count(SERDE.encode(too_large).meta)


def test_the_worked_example_in_the_description_of_the_format_is_true() -> None:
    from shmstore.serde import wire

    line = next(line for line in wire.__doc__.splitlines() if "c7 00 03" in line)
    assert SERDE.encode(torch.zeros(2, 3)).meta == bytes.fromhex(line)


def test_a_tensor_inside_a_transform_is_refused() -> None:
    with raises(UnsupportedValueError, names=("tensor", "storage")):
        torch.vmap(lambda t: SERDE.encode(t) and t)(torch.zeros(3, 2))


def _quiet(make: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments)


def _freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


Point = namedtuple("Point", "x y")
REFUSED = [
    *(Foo(), Foo, {1, 2}, 1j, bytearray(b"a"), OrderedDict(a=1), Point(1, 2), msgpack.ExtType(3, b""), Path("a")),
    *(np.datetime64("2020-01-01"), np.longdouble(1), TensorSpec((1,), np.dtype("f4"))),
    *(torch.eye(3).to_sparse(), torch.ones(2, device="meta"), _freed(), torch.zeros([1] * (MAX_NDIM + 1))),
    _quiet(torch.quantize_per_tensor, torch.ones(3), 0.1, 0, torch.qint8),
    _quiet(torch.nested.nested_tensor, [torch.ones(2), torch.ones(3)]),
    *(np.array([1, "a"], object), np.ma.array([1], mask=[True]), np.rec.array([(1, 2.0)], "i4,f8")),
    np.zeros(1, [(("a title", "a"), "<f4")]),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_a_refused_value_is_named_by_its_path(value: Any) -> None:
    for path, wrapped in (("value", value), ("value[(1, 'x')][2][1]", {(1, "x"): [1, 2, (None, value)]})):
        with raises(UnsupportedValueError, names=[f"{path}: no serializer for"], hint=["register_type"]) as caught:
            SERDE.encode(wrapped)
        assert path == caught.value.path


def test_a_refused_value_does_not_disturb_the_next() -> None:
    for _ in range(3):
        with pytest.raises(UnsupportedValueError):
            SERDE.encode(["half written", (1, Foo())])
        assert exact(round_trip([1, (2,)])) == exact([1, (2,)])


def nested_lists(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def nested_dicts(depth: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = {"a": (value,)}
    return value


def test_the_deepest_allowed_value_comes_back() -> None:
    for value in (nested_lists(MAX_DEPTH), nested_dicts(MAX_DEPTH // 2), {tuple_key(MAX_DEPTH - 1): 1}):
        assert exact(round_trip(value)) == exact(value)


class Endless:
    """Becomes another one."""


register_type("test.Endless", Endless, lambda _: Endless(), lambda tree: tree)


@pytest.mark.parametrize("make", [nested_lists, nested_dicts, lambda n: {tuple_key(n - 1): 1}, lambda _: Endless()])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900])
def test_a_value_that_is_too_deep_is_refused_with_a_hint(make: Callable[[Any], Any], depth: int) -> None:
    with raises(NestingError, names=[str(MAX_DEPTH)], hint=["contains itself"]):
        SERDE.encode(make(depth))


def tuple_key(depth: int) -> Any:
    key: tuple[Any, ...] = ()
    for _ in range(depth - 1):
        key = (key,)
    return key


def test_leaves_that_together_have_more_bytes_than_there_can_be_are_refused() -> None:
    half = np.broadcast_to(np.zeros(1, np.uint8), (MAX_NBYTES // 2 + 64,))
    with pytest.raises(ObjectTooLargeError):
        SERDE.encode([half, half])


def test_what_is_kept_alive_is_what_the_spans_point_into() -> None:
    value = {"a": torch.ones(1000), "b": np.ones(1000), "c": (torch.ones(3),)}
    encoded = SERDE.encode(value)
    expected = exact(value)
    value.clear()
    junk = [torch.zeros(1000) for _ in range(50)]
    assert exact(SERDE.decode(encoded.meta, store(encoded))) == expected
    assert len(junk) == 50


def test_the_serializers_meet_the_protocol_and_pickle() -> None:
    for serde in (MsgpackSerde(), PickleSerde()):
        assert isinstance(serde, ObjectSerde)
        assert type(pickle.loads(pickle.dumps(serde))) is type(serde)


def test_a_fill_writes_all_of_its_region_and_nothing_beside_it() -> None:
    sources: list[Any] = [*STRIDED_TENSORS.values(), *STRIDED_ARRAYS.values()]
    for source in sources:
        nbytes = source.nbytes
        region = aligned(nbytes + 2 * ALIGNMENT)
        dst = memoryview(region).cast("B")[ALIGNMENT : ALIGNMENT + nbytes]
        SERDE.fill(dst, source)
        around = bytes(region)
        assert around[:ALIGNMENT] + around[ALIGNMENT + nbytes :] == b"\xa5" * (2 * ALIGNMENT)
        if isinstance(source, torch.Tensor) and source._is_zerotensor():
            source = torch.zeros(source.shape)
        assert around[ALIGNMENT : ALIGNMENT + nbytes] == exact(source)[-1]
