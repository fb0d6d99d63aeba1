"""What errors say: which object, rank or resource it is about, and what to do next."""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    ObjectTooLargeError,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    StoreHandle,
    StoreNotFoundError,
    TensorSpec,
)
from tests.support import Stores, raises

Call = Callable[[ObjectStoreWriter, ObjectStoreReader, Any], object]
attach = ObjectStoreReader.attach
HANDLE = '{"name": "x", "store_id": %s, "n_readers": 1%s}'


def closed(writer: ObjectStoreWriter) -> ObjectStoreWriter:
    writer.close()
    return writer


# The call with a writer, its reader and a stale reference; what it raises; parts of its message, and of its hint. NAME
# is the store's.
SAID: list[tuple[Call, type[Exception], list[str], list[str]]] = [
    (lambda w, r, ref: w.put("a-key", 1), ObjectExistsError, ["'a-key'"], ["get_cached", "find_or_claim", "wait="]),
    (lambda w, r, ref: w.get_cached("absent"), ObjectNotFoundError, ["'absent'"], []),
    (lambda w, r, ref: r.get(ref), StaleRefError, ["id=2"], []),
    (lambda w, r, ref: r.get(b"x"), TypeError, ["ObjectRef", "bytes", "from_bytes"], []),  # type: ignore[arg-type]
    (lambda w, r, ref: r.get("a"), TypeError, ["ObjectRef", "str", "put", "get_cached"], []),  # type: ignore[arg-type]
    (lambda w, r, ref: attach(w), TypeError, ["ObjectStoreWriter", "handle"], []),  # type: ignore[arg-type]
    (lambda w, r, ref: attach(w.handle.to_json()), ValueError, [], ["from_json"]),
    (lambda w, r, ref: attach(w.name, 4), ValueError, ["NAME", "no rank 4", "n_readers is 2"], []),
    (
        lambda w, r, ref: attach(w.handle, 0),
        RankInUseError,
        ["rank 0", "NAME", f"process {os.getpid()}"],
        ["close", "rank=None"],
    ),
    (lambda w, r, ref: StoreHandle.from_json("{}"), ValueError, ["handle", "name", "store_id", "n_readers"], []),
    (lambda w, r, ref: StoreHandle.from_json("[]"), ValueError, ["store handle", "[]"], []),
    (lambda w, r, ref: StoreHandle.from_json(HANDLE % (1, ', "more": 1')), ValueError, ["store handle", "more"], []),
    (lambda w, r, ref: StoreHandle.from_json(HANDLE % ("true", "")), ValueError, ["store handle", "store_id"], []),
    (lambda w, r, ref: StoreHandle.from_json("shmstore-1"), ValueError, ["store handle", "shmstore-1"], []),
    (lambda w, r, ref: StoreHandle(1, 2, 3), TypeError, ["name", "str", "int"], []),  # type: ignore[arg-type]
    (lambda w, r, ref: StoreHandle("x", True, 3), TypeError, ["store_id", "int", "bool"], []),
    (lambda w, r, ref: StoreHandle("x", 2, 3, None), TypeError, ["dir", "None"], []),  # type: ignore[arg-type]
    (lambda w, r, ref: attach("a\0b"), ValueError, ["NUL", "200"], ["dir"]),
    (lambda w, r, ref: attach(closed(w).handle, 1), StoreNotFoundError, ["NAME"], ["closes it"]),
    (lambda w, r, ref: closed(w).__enter__(), StoreClosedError, ["NAME"], []),
    *(
        (lambda w, r, ref, dtype=dtype: TensorSpec((2,), dtype), TypeError, ["dtype", "torch.dtype", repr(dtype)], [])
        for dtype in ("nonsense", None, 5, "f4,,", ("f4", -1), {"names": 1})
    ),
    *(
        (lambda w, r, ref, shape=shape: TensorSpec(shape, torch.int8), TypeError, ["shape", "ints", repr(shape)], [])
        for shape in (5, "ab", (1.5,))
    ),
]


@pytest.mark.parametrize(("call", "error", "names", "hint"), SAID)
def test_errors_name_what_they_are_about_and_what_to_do(
    stores: Stores, call: Call, error: type[Exception], names: list[str], hint: list[str]
) -> None:
    writer = stores.create(8192, n_readers=2)
    writer.put("a-key", 1)
    gone: ObjectRef = writer.put("gone", 1)
    writer.cancel(gone)
    writer.delete("gone")
    with raises(error, [writer.name if name == "NAME" else name for name in names], hint):
        call(writer, stores.attach(writer), gone)


def test_a_process_is_named_with_its_title_and_as_one_that_has_outlived_its_server(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    work = (
        "import os, sys, signal; from shmstore import ObjectStoreReader\n"
        "with open('/proc/self/comm', 'w') as title: title.write('VLLM::Work')\n"
        "reader = ObjectStoreReader.attach(sys.argv[1], 0); print(os.getpid(), flush=True); signal.pause()"
    )
    server = ["sh", "-c", '"$@" & read _', "sh", sys.executable, "-c", work, writer.name]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        with raises(RankInUseError, names=[f"process {worker} (VLLM::Work"]) as caught:
            attach(writer.handle, 0)
        assert "ended" not in caught.value.message
        process.stdin.close()
        process.wait()
        try:
            with raises(RankInUseError, names=["VLLM::Work, whose parent has ended"]):
                attach(writer.handle, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_reference_of_another_store_or_writer_says_so(stores: Stores) -> None:
    ours, other = stores.create(8192, n_readers=1, n_writers=2), stores.create(8192, n_readers=1)
    ref = other.put("a", 1)
    numbers = [f"{store.handle.store_id:08x}" for store in (ours, other)]
    with raises(StaleRefError, hint=numbers):
        stores.attach(ours).get(ref)
    with raises(StaleRefError, hint=numbers):
        ours.cancel(ref)
    second = stores.keep(ObjectStoreWriter.join(ours.handle))
    with raises(StaleRefError, [f"id={(ref := ours.put('b', 1)).monotonic_id}"], hint=["only the writer"]):
        second.cancel(ref)


def test_a_reader_of_a_removed_store_says_whether_there_is_a_new_one(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=2)
    reader, ref = stores.attach(writer), writer.put("a", 1)
    writer.cancel(ref)
    writer.delete("a")
    writer.close(unlink=True)
    with raises(StoreNotFoundError, names=[writer.name, "was removed"], hint=["attach again"]):
        reader.get(ref)
    stores.keep(ObjectStoreWriter.create(writer.name, capacity=8192, n_readers=1))
    with raises(StoreClosedError, names=[writer.name, "created again"], hint=["attach again"]):
        reader.get(ref)


# ---- a full store


def test_long_bytes_are_refused_with_the_advice_to_put_an_array(stores: Stores) -> None:
    writer = stores.create(1 << 20, n_readers=1, max_object_size=1 << 16)
    with raises(ObjectTooLargeError, names=["0 bytes (and 65542 of key and metadata)"], hint=["uint8 array", "larger"]):
        writer.put("a", bytes(1 << 16))
    with raises(ObjectTooLargeError, names=["65536 bytes"]) as caught:
        writer.put("a", np.zeros(1 << 16, np.uint8))
    assert "uint8" not in caught.value.hint


def refused(writer: ObjectStoreWriter, size: int = 2000, **parts: Any) -> StoreFullError:
    """Return the error of a put for which there is no room."""
    with raises(StoreFullError, **parts) as caught:
        writer.put("refused", torch.ones(size))
    return caught.value


def test_a_full_store_names_ranks_that_never_came_and_a_lease_without_group(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=3, groups=[1, 2])
    stores.attach(writer, 1)
    writer.put("a", torch.ones(1000))
    hint = refused(writer, hint=("never attached: 0, 2;", "retire(rank)", "assign_group(ref, group)")).hint
    assert 1 == hint.count("lease=False")
    writer.retire(2)
    refused(writer, hint=["never attached: 0;"])
    stores.attach(writer, 0)
    assert "never attached" not in refused(writer).hint
    alone = stores.create(8192, n_readers=1)
    alone.put("a", torch.ones(1000))
    assert "assign_group" not in refused(alone).hint


@pytest.mark.parametrize("resource", ["bytes", "slots", "leases"])
def test_a_full_store_says_what_has_run_out(stores: Stores, resource: str) -> None:
    writer = stores.create(8192, n_readers=1, max_objects=2)
    ref = writer.put("a", 1)
    if resource == "slots":
        writer.put("b", 1)
    while resource == "leases" and writer.stats().open_leases < writer.stats().max_leases:
        writer.get_cached("a")
    stats = writer.stats()
    names = {
        "bytes": ("8080 bytes", "8192 with key and metadata", f"{8192 - stats.used_bytes} of 8192 free"),
        "slots": ("2 slots",),
        "leases": (f"{stats.max_leases} lease entries",),
    }
    error = refused(writer, 2020 if resource == "bytes" else 1, names=[*names[resource], "held by rank 0"])
    assert resource == error.resource == pickle.loads(pickle.dumps(error)).resource
    assert ("max_objects" in error.hint) is (resource != "bytes")
    assert ({0: stats.used_bytes}, 8080 if resource == "bytes" else 4) == (error.held_bytes_by_rank, error.needed)
    if resource == "leases":  # what opens none needs none
        with writer.reserve("new", TensorSpec((10,), torch.uint8)):
            pass
        with raises(StoreFullError, names=["lease entries"]):
            writer.get_cached("new")
    writer.cancel(ref)
    writer.check_valid()


def test_a_store_whose_space_is_split_says_what_could_go_and_what_is_in_between(stores: Stores) -> None:
    writer = stores.create(1 << 20)
    reader = stores.attach(writer)
    refs = [writer.put(f"k{i}", torch.full((100_000,), i, dtype=torch.uint8)) for i in range(10)]
    view = reader.get(refs[4])
    for ref in refs:
        reader.release(ref)
    span = refs[1].address - refs[0].address
    free = (1 << 20) - 10 * span
    longest = (1 << 20) - 5 * span  # after the one that is looked at
    head = span - 100_032  # bytes of the ring that are not payload
    for _ in range(2):  # the second refusal is a remembered one
        error = refused(writer, 175_000, hint=("split", "release references"))
        numbers = [int(number) for number in re.findall(r"\d+", error.message)]
        assert [700_000, 700_032 + head, free, 1 << 20, 9 * span, longest, 0, span] == numbers
    assert view[0] == 4
    writer.put("new", torch.zeros(longest - head, dtype=torch.uint8))


def test_a_full_store_says_what_the_writer_itself_keeps(stores: Stores) -> None:
    writer = stores.create(8192)
    writer.cancel(writer.put("a", torch.zeros(500)))
    with writer.protect(["a"]), writer.reserve("mine", TensorSpec((1000,), torch.uint8)):
        kept = f"{writer.stats().used_bytes} bytes protected, held by the writer or in unfinished puts"
        refused(writer, names=[kept], hint=["hold", "protect()", "begin()"])


@pytest.mark.parametrize(("seconds", "words"), [(0.25, "0.25 seconds:"), (1, "1 second:")])
def test_a_message_says_how_long_it_has_waited(stores: Stores, seconds: float, words: str) -> None:
    writer = stores.create(8192, n_readers=1)
    writer.put("a", torch.ones(1000))
    with raises(StoreFullError, [f"after {words}"], hint=["lease=False"]):
        writer.put("b", torch.ones(2000), timeout=seconds)
