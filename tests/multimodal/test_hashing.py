"""`hash_item`: equal contents have equal hashes, and different contents have different ones."""

import contextlib
import enum
import hashlib
import io
import sys
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from shmstore import NestingError
from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    hash_item,
)
from shmstore.multimodal.values import hashing
from tests.multimodal.helpers import item, three_tensors
from tests.support import raises

SCALARS = [True, False, 1, 0, -1, 2**70, 1.0, -0.0, 0.0, float("nan"), 1 + 0j, "1", b"1", "", b""]
LISTS = [[], (), {}, [[]], ["ab"], ["a", "b"], ("a", "b"), [["a"], "b"], [["a", "b"]], ["aSb", "c"], ["a", "bSc"]]
DICTS: list[Any] = [{"a": "b"}, {"a": {"b": None}}, {"a": None, "b": None}, {1: "b"}]
TENSORS = [
    *(torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32)),
    *(torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(0.0)),
]
ARRAYS = [np.zeros(2, np.float32), np.zeros(2, ">f4"), np.float32(1.0)]
ITEMS = [item(3), item(3, fill=2), three_tensors(8)]
DIFFERENT: list[Any] = [*SCALARS, *LISTS, *DICTS, *TENSORS, *ARRAYS, *ITEMS, memoryview(b"\1\0\0\0")]

Size = namedtuple("Size", "height width")


class Crop(enum.StrEnum):
    CENTRE = "centre"


class Mode(enum.IntEnum):
    FAST = 1


class Fit(enum.Enum):
    COVER = "cover"
    CONTAIN = "contain"
    HALF = torch.float16


class OtherFit(enum.Enum):
    COVER = "cover"


class Flips(enum.Flag):
    ACROSS = enum.auto()
    DOWN = enum.auto()


make_enum: Any = enum.Enum  # mypy takes a call of Enum for a declaration
VERSIONED = [
    torch.float16,
    np.dtype("<f2"),
    PurePosixPath("a/b"),
    make_enum("Fit", {"COVER": "cover"}, module="m").COVER,
]
DTYPES = [torch.float16, torch.bfloat16, np.dtype("<f2"), np.dtype(">f2"), np.dtype("V8")]
PATHS = [PurePosixPath("a/b"), PureWindowsPath("a/b"), PurePosixPath("a\\b"), PurePosixPath("torch.float16")]
FLIPS = [Flips.ACROSS, Flips.DOWN, Flips.ACROSS | Flips.DOWN, Flips(0)]
SETTINGS = [*DTYPES, *PATHS, Fit.COVER, Fit.CONTAIN, Fit.HALF, OtherFit.COVER, *FLIPS]


def test_no_two_different_values_or_settings_of_a_processor_have_one_hash() -> None:
    texts = [str(value) for value in SETTINGS] + ["<f2", "float16", "cover", "COVER", "a/b"]
    names = {hash_item(value) for value in [*SETTINGS, *texts, *DIFFERENT]}
    assert len(SETTINGS) + len(set(texts)) + len(DIFFERENT) == len(names)
    assert {64} == {len(name) for name in names}


def test_equal_settings_have_one_hash_wherever_they_come_from() -> None:
    assert hash_item(np.dtype("float32")) == hash_item(np.dtype(np.float32))
    assert hash_item(Path("a") / "b") == hash_item(Path("a//b/"))
    spawned = make_enum("Crop", ["A"], module="__mp_main__")
    assert hash_item(make_enum("Crop", ["A"], module="__main__").A) == hash_item(spawned.A)
    assert hash_item(make_enum("Crop", ["A"], module="m").A) != hash_item(spawned.A)
    assert hash_item(make_enum("Crop", {"A": 2}, module="__main__").A) != hash_item(spawned.A)


@pytest.mark.skipif(sys.byteorder != "little", reason="arrays in this machine's byte order hash otherwise on others")
def test_a_hash_is_what_it_was_in_every_version() -> None:
    """The hashes are keys of a store, which may outlive its writer."""
    every = hashlib.sha256("".join(hash_item(value, "sha256") for value in DIFFERENT).encode()).hexdigest()
    assert every == "1eed023303d24c85052349ba9337ec40de4fdf3a7b95fa39cdb82cece89e753a"
    assert hash_item(Crop.CENTRE, "sha256") == "4750f7ba3741189cb74218f6cef7ec12c9cbd9cd828d15366f113e356b706107"
    settings = hashlib.sha256("".join(hash_item(value, "sha256") for value in VERSIONED).encode()).hexdigest()
    assert settings == "d90f1c72ed2a45eaa9d38ebfb1a69b3093e3eeb4a2d5ae36f2dff65ea30d5990"


def test_the_hash_is_of_the_content_and_not_of_how_it_lies_in_memory() -> None:
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


def test_keyword_arguments_count_and_their_order_does_not() -> None:
    assert hash_item("x", size=1, crop=True) == hash_item("x", crop=True, size=1)
    different = [
        hash_item("x"),
        hash_item("x", size=1),
        hash_item("x", size=2),
        hash_item("x", crop=1),
        hash_item(["x", {"size": 1}]),
        hash_item({"x": 1}),
        hash_item("x", value=1),
        hash_item("x", kwargs=1),
    ]
    assert len(different) == len(set(different))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"ab", bytearray(b"ab")),
        (b"ac", memoryview(b"abcd")[::2]),
        ((1, 2), Size(1, 2)),
        ({"a": 1}, OrderedDict(a=1)),
        ("centre", Crop.CENTRE),
        (1, Mode.FAST),
        (np.array(1.0, np.float32), np.float32(1.0)),
        ("ab", np.str_("ab")),
        (b"ab", np.bytes_(b"ab")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_docstring_calls_equal_has_one_hash(one: Any, other: Any) -> None:
    assert hash_item(one) == hash_item(other)


def elem(field: MultiModalField, data: torch.Tensor | None = None) -> MultiModalKwargsItem:
    data = torch.zeros(4) if data is None else data
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "pixels", data, field)])


def test_items_differ_by_how_they_are_joined_and_not_by_the_batch_they_were_cut_from() -> None:
    flat = MultiModalFlatField([slice(0, 4)])
    different = [
        elem(MultiModalBatchedField()),
        elem(MultiModalSharedField(1)),
        elem(flat),
        elem(MultiModalFlatField([slice(0, 4)], -1)),
        elem(flat, torch.ones(4)),
    ]
    names = [hash_item(value) for value in different]
    assert len(different) == len(set(names))
    assert names[1] == hash_item(elem(MultiModalSharedField(3)))
    assert names[2] == hash_item(elem(MultiModalFlatField([slice(0, 2), slice(2, 6)])))


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(2)], layout=torch.strided)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"a": [1, 2, object()]}, ("value['a'][2]", "object")),
        (None, ("value:", "None")),
        ([{1, 2}], ("value[0]", "set")),
        (np.array([object()]), ("value:", "dtype of objects")),
        (
            torch.zeros(2, device="meta"),
            ("value:", "tensor"),
        ),
        (torch.eye(2).to_sparse(), ("value:", "tensor")),
        ({frozenset(): 1}, ("value:", "key of frozenset")),
        ([nested_tensor()], ("value[0]", "tensor")),
        ([np.ma.array([1, 2], mask=[False, True])], ("value[0]", "masked array")),
        ([np.ma.masked], ("value[0]", "masked array")),
        ([np.zeros(2, [("a", "i1")])], ("value[0]", "dtype", "fields")),
        ([np.dtype(("<f4", (2,)))], ("value[0]", "dtype", "arrays")),
        ([np.zeros(2, np.clongdouble)], ("value[0]", "dtype", "long doubles")),
        (make_enum("Late", {"A": object()}).A, ("value.value", "object")),
    ],
)
def test_what_cannot_be_hashed_is_named_by_its_path(value: Any, names: tuple[str, ...]) -> None:
    with raises(TypeError, names):
        hash_item(value)
    with raises(TypeError, names=("kwargs['k']", "object")):
        hash_item("x", k=object())


def test_a_container_that_contains_itself_is_refused_by_a_typed_error() -> None:
    knot: list[Any] = [1]
    knot.append({"k": knot})
    with raises(NestingError, names=["value"]):
        hash_item(knot)
    with raises(NestingError, names=["kwargs"]):
        hash_item("x", k=knot)


def test_blake3_is_taken_where_it_is_installed_and_sha256_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        blake3 = hashlib.blake2s

    monkeypatch.setitem(sys.modules, "blake3", Package)
    hashers = hashing._find_hashers()
    assert [hashlib.blake2s] * 2 == [hashers[None], hashers["blake3"]]
    monkeypatch.setitem(sys.modules, "blake3", None)
    monkeypatch.setattr(hashing, "_hashers", hashing._find_hashers())
    assert hash_item("x", "sha256") == hash_item("x")
    with raises(ImportError, names=("blake3", "sha256")):
        hash_item("x", "blake3")


def test_the_algorithm_is_chosen_by_position_and_keywords_stay_the_processors() -> None:
    stream = bytearray()
    hashing._feed(stream.extend, "x", "value")
    hashing._feed(stream.extend, {"size": 1}, "kwargs")
    for algorithm in ("sha256", "sha512"):
        expected = hashlib.new(algorithm, stream).hexdigest()
        assert expected == hash_item("x", algorithm, size=1)
    assert hash_item("x") == hash_item("x", None)
    assert 3 == len({hash_item("x"), hash_item("x", algorithm="sha256"), hash_item("x", algorithm="md5")})


@pytest.mark.parametrize("algorithm", ["md5", "", "SHA256", 256, torch.zeros(2), ["sha256"]], ids=repr)
def test_another_algorithm_is_refused_with_those_that_there_are(algorithm: Any) -> None:
    with raises(ValueError, names=("algorithm", "blake3", "sha256", "sha512")):
        hash_item("x", algorithm)


@pytest.fixture(name="pillow")
def _pillow() -> Any:
    return pytest.importorskip("PIL.Image", reason="Pillow comes with the demo extra")


def test_images_are_hashed_by_what_a_processor_can_see(pillow: Any) -> None:
    image = pillow.new("RGB", (4, 3), (1, 2, 3))
    turned = image.copy()
    turned.getexif()[0x0112] = 6
    not_turned = image.copy()
    not_turned.getexif()[0x0112] = "6"
    palette = pillow.new("P", (4, 3))
    palette.putpalette([1, 2, 3] * 256)
    other_palette = palette.copy()
    other_palette.putpalette([3, 2, 1] * 256)
    different = [
        image,
        pillow.new("RGB", (3, 4), (1, 2, 3)),
        pillow.new("RGB", (4, 3), (1, 2, 4)),
        pillow.new("L", (4, 9)),
        turned,
        not_turned,
        palette,
        other_palette,
        image.tobytes(),
    ]
    names = [hash_item(value) for value in different]
    assert len(different) == len(set(names))
    assert names[0] == hash_item(image.copy())


def test_the_alpha_of_a_palette_counts(pillow: Any) -> None:
    images = []
    for colours, mode in (([1, 2, 3], "RGB"), ([1, 2, 3, 255], "RGBA"), ([1, 2, 3, 0], "RGBA")):
        image = pillow.new("P", (2, 2))
        image.putpalette(colours * 256, mode)
        images.append(image)
    images += [pillow.new("P", (2, 2)), pillow.new("P", (2, 2))]
    images[3].putpalette(range(12), "RGB")  # the same numbers, as four colours or as three
    images[4].putpalette(range(12), "RGBA")
    assert len(images) == len({hash_item(image) for image in images})


def saved(pillow: Any, kind: str, frames: int, **options: Any) -> io.BytesIO:
    """A picture of this format, with pixels that tell its orientation, as it comes from a file."""
    stream = io.BytesIO()
    images = [pillow.new("RGB", (64, 48), (250, 2, 3 + 200 * n)) for n in range(frames)]
    images[0].paste((0, 255, 0), (0, 0, 20, 10))
    if frames > 1:
        options |= {"save_all": True, "append_images": images[1:]}
    images[0].save(stream, kind, **options)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "GIF", "WEBP", "ICO", "ICNS", "BMP"])
def test_an_image_has_the_same_hash_before_and_after_its_pixels_are_loaded(pillow: Any, kind: str) -> None:
    options = {}
    if kind in ("TIFF", "JPEG", "PNG", "WEBP"):
        exif = pillow.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    data = saved(pillow, kind, 1, **options).getvalue()
    lazy, loaded, asked = (pillow.open(io.BytesIO(data)) for _ in range(3))
    loaded.load()
    asked.getexif()
    names = [hash_item(image) for image in (lazy, loaded, asked, lazy)]
    assert 1 == len(set(names))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP", "MPO"])
def test_an_image_of_several_frames_is_refused_and_copies_of_its_frames_are_not(pillow: Any, kind: str) -> None:
    image = pillow.open(saved(pillow, kind, 3))
    with raises(TypeError, names=("value[0]", "image", "several frames"), hint=["image.copy()"]):
        hash_item([image])
    assert 0 == image.tell()
    frames = []
    for index in range(3):
        image.seek(index)
        frames.append(image.copy())
    assert 3 == len({hash_item(frame) for frame in frames})


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "GIF": lambda data: data[: data.rindex(b",\0\0\0\0") + 5],
    "PNG": lambda data: data[: data.rindex(b"fdAT") - 9],
    "MPO": lambda data: data[: data.rindex(b"\xff\xd8\xff")],
    "TIFF": lambda data: data[: pointer(data)] + b"\1\0\0\0" + data[pointer(data) + 4 :],
}


def pointer(data: bytes) -> int:
    """Return where the first page of a TIFF points to the second."""
    start = int.from_bytes(data[4:8], "little")
    return start + 2 + 12 * int.from_bytes(data[start : start + 2], "little")


@pytest.mark.filterwarnings("ignore:.*EXIF:UserWarning")
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("kind", BREAKS)
def test_an_image_with_a_broken_second_frame_is_one_picture_and_stays_so(pillow: Any, kind: str, loads: bool) -> None:
    exif = pillow.Exif()
    exif[0x0112] = 6
    options: dict[str, Any] = {"PNG": {"exif": exif, "disposal": 1}, "GIF": {}}.get(kind, {"exif": exif})
    image = pillow.open(io.BytesIO(BREAKS[kind](saved(pillow, kind, 2, **options).getvalue())))
    if loads:
        image.load()
    before = image.info.get("exif")
    names = [hash_item(image), hash_item(image)]
    alone = pillow.open(saved(pillow, "JPEG" if kind == "MPO" else kind, 1, **options))
    assert [hash_item(alone)] * 2 == names
    image.load()
    assert (0, before, names) == (image.tell(), image.info.get("exif"), [hash_item(image)] * 2)


def test_an_image_of_another_package_is_asked_whether_it_moves(pillow: Any) -> None:
    image = pillow.new("RGB", (2, 2))
    image.__class__ = type("Moving", (pillow.Image,), {"is_animated": True})
    for file in (None, io.BytesIO(b"of another make")):
        image._fp = file
        with pytest.raises(TypeError, match="several frames"):
            hash_item(image)


def test_a_picture_of_many_pages_is_refused_after_reading_two(pillow: Any) -> None:
    reads = []
    for pages in (3, 60):
        stream = saved(pillow, "TIFF", pages)
        stream.read = Mock(wraps=stream.read)  # type: ignore[method-assign]
        image = pillow.open(stream)
        with pytest.raises(TypeError):
            hash_item(image)
        reads.append(stream.read.call_count)
    assert reads[0] == reads[1]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF"])
def test_an_image_that_is_cut_off_or_closed_is_named_by_its_path_and_why(pillow: Any, kind: str) -> None:
    data = saved(pillow, kind, 1).getvalue()
    image = pillow.open(io.BytesIO(data[:-100]))
    for _ in range(2):  # a partly decoded image must not be accepted the second time
        with raises(ValueError, names=("value['a'][1]", "image", "truncated")):
            hash_item({"a": [1, image]})
    closed, without_file = (pillow.open(io.BytesIO(data)) for _ in range(2))
    closed.close()
    without_file.fp.close()
    for image in (closed, without_file):
        with raises(ValueError, names=("kwargs['k']", "image")):
            hash_item("x", k=image)


BROKEN_EXIF = {
    "no TIFF header": b"Exif\0\0 no header",
    "nothing": b"Exif\0\0",
    "a directory beyond the end": b"Exif\0\0II*\0\xff\xff\0\0",
    "a directory that is cut off": b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0",
}


@pytest.mark.filterwarnings("ignore:.*EXIF:UserWarning")
@pytest.mark.parametrize("broken", BROKEN_EXIF)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photograph_with_a_broken_exif_header_has_no_orientation(pillow: Any, kind: str, broken: str) -> None:
    ops = pytest.importorskip("PIL.ImageOps")
    data = saved(pillow, kind, 1, exif=BROKEN_EXIF[broken]).getvalue()
    plain = pillow.open(io.BytesIO(data)).convert("RGB")
    plain.info.clear()
    image = pillow.open(io.BytesIO(data))
    images = [pillow.open(io.BytesIO(data)), image.convert("RGB"), image.copy()]
    with contextlib.suppress(Exception):  # it refuses some of these headers
        images.append(ops.exif_transpose(image))
    assert {hash_item(plain)} == {hash_item(image) for image in [*images, *images]}


def test_what_was_loaded_of_an_image_can_be_hashed_after_its_file_was_closed(pillow: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.gif"
    path.write_bytes(saved(pillow, "GIF", 1).getvalue())
    with pillow.open(path) as image:
        image.load()
    assert hash_item(pillow.open(saved(pillow, "GIF", 1))) == hash_item(image)


@pytest.mark.parametrize("part", ["load", "getexif"])
def test_where_memory_runs_out_an_image_is_not_called_unreadable(
    pillow: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    image = pillow.new("RGB", (2, 2))
    monkeypatch.setattr(image, part, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        hash_item(image)
