"""What errors say: which object, rank or resource it is about, and what to do next."""

import os
import pickle
import re
from typing import Any, cast

import pytest
import torch

from shmstore import (
    MsgpackSerde,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStoreReader,
    ObjectStoreWriter,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    StoreHandle,
    StoreNotFoundError,
    TensorSpec,
)
from tests.support import Stores, crowd, in_child, segments, store_name


def message(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_errors_name_what_they_are_about_and_what_to_do(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=2)
    reader = stores.attach(writer)
    ref = writer.put("a-key", 1)
    gone = writer.put("gone", 1)
    writer.cancel(gone)
    writer.delete("gone")

    assert "'a-key'" in message(ObjectExistsError, lambda: writer.put("a-key", 1))
    assert "'absent'" in message(ObjectNotFoundError, lambda: writer.get_cached("absent"))
    assert f"id={gone.monotonic_id}" in message(StaleRefError, lambda: reader.get(gone))
    assert "from_bytes" in message(TypeError, lambda: reader.get(ref.to_bytes()))  # type: ignore[arg-type]
    assert "its handle" in message(TypeError, lambda: ObjectStoreReader.attach(writer))  # type: ignore[arg-type]
    assert "from_json" in message(StoreNotFoundError, lambda: ObjectStoreReader.attach(writer.handle.to_json()))
    taken = message(RankInUseError, lambda: ObjectStoreReader.attach(writer.handle, 0))
    assert (
        f"rank 0 of store {writer.name!r} is taken by process {os.getpid()} (hint: if that is this process, close"
        in taken
    )
    assert "create(" in message(TypeError, lambda: ObjectStoreWriter(1 << 20, "x", None))  # type: ignore[arg-type]
    assert "attach(" in message(TypeError, lambda: ObjectStoreReader(1, "x", 0, None))  # type: ignore[arg-type]
    handle = writer.handle
    writer.close()
    assert "its writer has closed it" in message(StoreNotFoundError, lambda: ObjectStoreReader.attach(handle, 1))
    assert "cannot be entered again" in message(StoreClosedError, writer.__enter__)


def test_a_full_store_names_the_ranks_that_have_never_come(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=3)
    stores.attach(writer, 1)
    writer.put("a", torch.ones(1000))
    with pytest.raises(StoreFullError) as caught:
        writer.put("b", torch.ones(2000))
    assert caught.value.hint.startswith("ranks 0, 2 have never attached: start them, or retire(rank); or release")
    writer.retire(2)
    with pytest.raises(StoreFullError, match="rank 0 has never attached: start it, or"):
        writer.put("b", torch.ones(2000))
    stores.attach(writer, 0)
    with pytest.raises(StoreFullError) as caught:
        writer.put("b", torch.ones(2000))
    assert "never attached" not in caught.value.hint


def test_a_reference_of_another_store_says_so(stores: Stores) -> None:
    ours, other = stores.create(8192, n_readers=1), stores.create(8192, n_readers=1)
    ref = other.put("a", 1)
    with pytest.raises(StaleRefError, match=f"of store {other.handle.store_id:08x}, and this is"):
        stores.attach(ours).get(ref)
    with pytest.raises(StaleRefError, match="and this is"):
        ours.cancel(ref)


def attempt(handle: StoreHandle) -> str:
    try:
        ObjectStoreReader.attach(handle).close()
    except RankInUseError as error:
        return str(error)
    return "attached"


def test_a_rank_taken_by_another_process_names_it(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    stores.attach(writer)
    assert f"rank 0 of store {writer.name!r} is taken by process {os.getpid()} " in in_child(attempt, writer.handle)


@pytest.mark.parametrize("resource", ["bytes", "slots", "leases"])
def test_a_full_store_says_what_has_run_out(stores: Stores, resource: str) -> None:
    writer = stores.create(8192, n_readers=1, max_objects=2)
    ref = writer.put("a", 1)
    if resource == "slots":
        writer.put("b", 1)
    while resource == "leases" and writer.stats().open_leases < writer.stats().max_leases:
        writer.get_cached("a")
    with pytest.raises(StoreFullError) as caught:
        writer.put("new", torch.zeros(2020 if resource == "bytes" else 1))
    stats = writer.stats()
    said = {
        "bytes": f"8080 bytes (8192 with key and metadata) needed in one piece, {8192 - stats.used_bytes} of 8192 free",
        "slots": "all 2 slots are taken",
        "leases": f"all {stats.max_leases} lease entries are taken",
    }
    assert said[resource] in str(caught.value)
    assert resource == caught.value.resource == pickle.loads(pickle.dumps(caught.value)).resource
    assert ("max_objects" in caught.value.hint) is (resource != "bytes")
    assert {0: stats.used_bytes} == caught.value.held_bytes_by_rank
    if resource == "leases":  # what opens none needs none
        with writer.reserve("new", TensorSpec((10,), torch.uint8)):
            pass
        with pytest.raises(StoreFullError, match="lease entries"):
            writer.get_cached("new")
    writer.cancel(ref)
    writer.check_valid()


def test_a_retired_rank_that_is_attached_keeps_its_views_and_may_lose_what_it_has_not_read(stores: Stores) -> None:
    writer = stores.create(64 * 1024)
    reader = stores.attach(writer)
    read = writer.put("read", torch.arange(100))
    view = reader.get(read)
    unread = writer.put("unread", torch.arange(100))
    writer.retire(0)
    crowd(writer)
    assert torch.arange(100).equal(view)
    with pytest.raises(StaleRefError) as caught:
        reader.get(unread)
    assert "its rank retired" in caught.value.hint
    kept = writer.put("still there", 5)
    assert 5 == reader.get(kept)
    del view
    reader.close()
    again = stores.attach(writer)
    expected = writer.put("expected again", torch.arange(100))
    with pytest.raises(StoreFullError):
        writer.put("too large beside it", torch.zeros(64 * 1024 - 600, dtype=torch.uint8))
    assert torch.arange(100).equal(again.get(expected))


def test_a_store_whose_space_is_split_says_what_could_go_and_what_is_in_between(stores: Stores) -> None:
    writer = stores.create(1 << 20)
    reader = stores.attach(writer)
    refs = [writer.put(f"k{i}", torch.full((100_000,), i, dtype=torch.uint8)) for i in range(10)]
    view = reader.get(refs[4])
    for ref in refs:
        reader.release(ref)
    span = refs[1].address - refs[0].address
    free = (1 << 20) - 10 * span
    longest = (1 << 20) - 5 * span  # behind the one that is looked at
    head = span - 100_032  # bytes of the ring that are not payload
    for _ in range(2):  # the second refusal is a remembered one
        with pytest.raises(StoreFullError) as caught:
            writer.put("new", torch.zeros(700_000, dtype=torch.uint8))
        assert caught.value.message == (
            f"the store is full: 700000 bytes ({700_032 + head} with key and metadata) needed in one piece, "
            f"{free} of 1048576 free, {9 * span} reclaimable, {longest} of both in the longest piece; "
            f"held by rank 0: {span} bytes"
        )
        assert caught.value.hint.startswith("what is held splits the space: release references")
    assert view[0] == 4
    writer.put("new", torch.zeros(longest - head, dtype=torch.uint8))


@pytest.mark.parametrize("held", [8064, 832])
def test_what_a_refused_object_needs_counts_its_key_and_metadata(stores: Stores, held: int) -> None:
    """Else it would seem to have room, and what is held would seem to split it."""
    writer = stores.create(8192)
    writer.put("a", torch.zeros(held, dtype=torch.uint8))
    free = 8192 - writer.stats().used_bytes
    with pytest.raises(StoreFullError) as caught:
        writer.put("b" * 70, torch.zeros(free, dtype=torch.uint8))
    said = re.search(r"(\d+) bytes \((\d+) with key and metadata\) .* (\d+) of both", caught.value.message)
    assert said is not None
    assert [free, free + 128, free] == [int(number) for number in said.groups()]
    assert "splits" not in caught.value.hint


def test_a_store_that_is_held_as_a_whole_does_not_blame_what_splits_it(stores: Stores) -> None:
    writer = stores.create(8192)
    stores.attach(writer)
    writer.put("a", torch.zeros(1500))
    with pytest.raises(StoreFullError, match=" 0 reclaimable, ") as caught:
        writer.put("b", torch.zeros(1500))
    assert caught.value.hint.startswith("release references")


def test_a_full_store_says_what_the_writer_itself_keeps(stores: Stores) -> None:
    writer = stores.create(8192)
    ref = writer.put("a", torch.zeros(500))
    writer.cancel(ref)
    spec = TensorSpec((1000,), torch.uint8)
    with writer.protect(["a"]), writer.reserve("mine", spec), pytest.raises(StoreFullError) as caught:
        writer.put("b", torch.zeros(2000))
    assert f"; {writer.stats().used_bytes} bytes in protect blocks or unfinished puts (hint: " in str(caught.value)


class NoSerde:
    """Has two of the four methods."""

    def encode(self, value: Any) -> None:
        raise NotImplementedError

    decode = encode


def test_arguments_that_cannot_work_are_refused_before_anything_is_done(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=2)
    name, closed = store_name(), stores.create(8192)
    closed.close(unlink=False)

    def refused(error: type[Exception], match: str, call: Any) -> None:
        with pytest.raises(error, match=match) as caught:
            call()
        assert type(caught.value) is error

    no_methods = "serde must be an ObjectSerde, such as MsgpackSerde(); int has no encode, fill, decode, layout"
    for serde, said in (
        (5, no_methods),
        (NoSerde(), "NoSerde has no fill, layout"),
        (MsgpackSerde, "an instance: pass MsgpackSerde()"),
    ):
        match, bad = re.escape(said), cast(Any, serde)
        refused(TypeError, match, lambda: ObjectStoreWriter.create(name, capacity=8192, n_readers=1, serde=bad))  # noqa: B023
        refused(TypeError, match, lambda: ObjectStoreWriter.recover(closed.name, serde=bad))  # noqa: B023
        refused(TypeError, match, lambda: ObjectStoreReader.attach(writer.handle, serde=bad))  # noqa: B023
    assert name not in segments()
    stores.attach(writer)  # nobody has taken the rank
    stores.recover(closed.name).close()
    refused(TypeError, r"not one key; write protect\(\['abc'\]\)", lambda: writer.protect("abc").__enter__())
    for call in (writer.get_cached, writer.is_cached, writer.touch, writer.delete, lambda key: writer.put(key, 1)):
        refused(ValueError, r"a key must be .*: surrogates not allowed \(position 1\)", lambda: call("a\ud800"))  # noqa: B023
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
        refused(ValueError, "not a store's name: 'a.ud800'; surrogates not allowed", lambda: call("a\ud800"))  # noqa: B023
        path = f"/dev/shm/{writer.name}"
        refused(ValueError, f"'{path}'; pass it without /dev/shm/", lambda: call(path))  # noqa: B023
        for handle, said in (
            (StoreHandle(writer.name, writer.handle.store_id, -9), "n_readers must be from 1 to 256, not -9"),
            (StoreHandle(writer.name, -1, 2), "store_id must be from 0"),
            (StoreHandle("a/b", 1, 2), "not a store's name: 'a/b'"),
        ):
            match = f"this StoreHandle is none that a writer made: {said}"
            refused(ValueError, match, lambda: call(handle))  # noqa: B023


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it has no name, store_id, n_readers"),
        ('{"name": "x", "n_readers": 1}', "it has no store_id"),
        ("[]", "is no JSON object"),
        ('{"name": "x", "store_id": 1, "n_readers": "1"}', "n_readers must be of type int"),
        ('{"name": "x", "store_id": 1, "n_readers": 1, "more": 1}', "more is none of a handle's fields"),
        ("shmstore-1", "is no JSON"),
    ],
)
def test_json_that_is_no_handle_says_what_is_wrong_with_it(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^not a store handle: ") as caught:
        StoreHandle.from_json(text)
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize("dtype", ["nonsense", None, 5, "f4,,", ("f4", -1), {"names": 1}])
def test_what_is_no_dtype_is_refused_with_what_would_be_one(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype .* or what numpy takes"):
        TensorSpec((2,), dtype)


@pytest.mark.parametrize("shape", [5, "ab", None, (1.5,)])
def test_what_is_no_shape_is_refused_with_what_would_be_one(shape: Any) -> None:
    with pytest.raises(TypeError, match="shape must be a sequence of ints, not "):
        TensorSpec(shape, torch.int8)


def test_who_calls_the_class_itself_is_told_what_makes_one() -> None:
    for call in (
        ObjectStoreWriter,
        lambda: ObjectStoreWriter("images"),  # type: ignore[arg-type]
        lambda: ObjectStoreWriter(capacity=1 << 20, n_readers=1),
    ):
        assert "made by ObjectStoreWriter.create(...) or .recover(name)" in message(TypeError, call)
    for call in (ObjectStoreReader, lambda: ObjectStoreReader("images", rank=0)):  # type: ignore[arg-type]
        assert "made by ObjectStoreReader.attach(handle, rank)" in message(TypeError, call)


def test_a_key_in_place_of_a_reference_is_told_what_makes_one(stores: Stores) -> None:
    writer = stores.create(8192)
    reader = stores.attach(writer)
    assert message(TypeError, lambda: reader.get("a")) == (
        "expected an ObjectRef, not str; the writer's put and get_cached make one of a key"
    )
