"""What errors say: which object, rank or resource it is about, and what to do next."""

import os
import pickle
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from shmstore import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStoreReader,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    StoreHandle,
    StoreNotFoundError,
    TensorSpec,
)
from tests.support import Stores, raises


def test_errors_name_what_they_are_about_and_what_to_do(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=2)
    reader = stores.attach(writer)
    ref = writer.put("a-key", 1)
    gone = writer.put("gone", 1)
    writer.cancel(gone)
    writer.delete("gone")

    with raises(ObjectExistsError, names=["'a-key'"]):
        writer.put("a-key", 1)
    with raises(ObjectNotFoundError, names=["'absent'"]):
        writer.get_cached("absent")
    with raises(StaleRefError, names=[f"id={gone.monotonic_id}"]):
        reader.get(gone)
    with raises(TypeError, names=("ObjectRef", "bytes", "from_bytes")):
        reader.get(ref.to_bytes())  # type: ignore[arg-type]
    with raises(TypeError, names=("ObjectRef", "str", "put", "get_cached")):
        reader.get("a")  # type: ignore[arg-type]
    with raises(TypeError, names=("ObjectStoreWriter", "handle")):
        ObjectStoreReader.attach(writer)  # type: ignore[arg-type]
    with raises(ValueError, names=["from_json"]):
        ObjectStoreReader.attach(writer.handle.to_json())
    with raises(ValueError, names=(writer.name, "no rank 4", "n_readers is 2")):
        ObjectStoreReader.attach(writer.name, 4)
    with raises(RankInUseError, names=("rank 0", repr(writer.name), f"process {os.getpid()}"), hint=["close"]):
        ObjectStoreReader.attach(writer.handle, 0)
    handle = writer.handle
    writer.close()
    with raises(StoreNotFoundError, names=[repr(handle.name)], hint=["closes it"]):
        ObjectStoreReader.attach(handle, 1)
    with raises(StoreClosedError):
        writer.__enter__()


def test_a_process_is_named_with_its_title_and_as_one_that_has_outlived_its_server(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    work = (
        "import os, sys, signal; from shmstore import ObjectStoreReader\n"
        "with open('/proc/self/comm', 'w') as title: title.write('VLLM::Work')\n"
        "reader = ObjectStoreReader.attach(sys.argv[1], 0); print(os.getpid(), flush=True); signal.pause()"
    )
    server = ["sh", "-c", '"$@" & read _', "sh", sys.executable, "-c", work, writer.name]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        with raises(RankInUseError, names=[f"process {worker} (VLLM::Work)"[:-1]]) as caught:
            ObjectStoreReader.attach(writer.handle, 0)
        assert "ended" not in caught.value.message
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        try:
            with raises(RankInUseError, names=["VLLM::Work, whose parent has ended"]):
                ObjectStoreReader.attach(writer.handle, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_full_store_names_the_ranks_that_have_never_come(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=3)
    stores.attach(writer, 1)
    writer.put("a", torch.ones(1000))
    with raises(StoreFullError, hint=("never attached: 0, 2", "retire(rank)", "release")):
        writer.put("b", torch.ones(2000))
    writer.retire(2)
    with raises(StoreFullError, hint=["never attached: 0;"]):
        writer.put("b", torch.ones(2000))
    stores.attach(writer, 0)
    with pytest.raises(StoreFullError) as caught:
        writer.put("b", torch.ones(2000))
    assert "never attached" not in caught.value.hint


def test_a_full_store_of_several_groups_tells_to_name_one(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=2, groups=[1, 1])
    writer.put("a", torch.ones(1000))
    with raises(StoreFullError, hint=["assign_group(ref, group)"]):
        writer.put("b", torch.ones(2000))


def test_a_reference_of_another_store_says_so(stores: Stores) -> None:
    ours, other = stores.create(8192, n_readers=1), stores.create(8192, n_readers=1)
    ref = other.put("a", 1)
    numbers = [f"{store.handle.store_id:08x}" for store in (ours, other)]
    with raises(StaleRefError, hint=numbers):
        stores.attach(ours).get(ref)
    with raises(StaleRefError, hint=numbers):
        ours.cancel(ref)


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
    with raises(StoreFullError, names[resource]) as caught:
        writer.put("new", torch.zeros(2020 if resource == "bytes" else 1))
    assert resource == caught.value.resource == pickle.loads(pickle.dumps(caught.value)).resource
    assert ("max_objects" in caught.value.hint) is (resource != "bytes")
    assert {0: stats.used_bytes} == caught.value.held_bytes_by_rank
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
        with raises(StoreFullError, hint=("split", "release references")) as caught:
            writer.put("new", torch.zeros(700_000, dtype=torch.uint8))
        numbers = [int(number) for number in re.findall(r"\d+", caught.value.message)]
        assert [700_000, 700_032 + head, free, 1 << 20, 9 * span, longest, 0, span] == numbers
    assert view[0] == 4
    writer.put("new", torch.zeros(longest - head, dtype=torch.uint8))


def test_a_full_store_says_what_the_writer_itself_keeps(stores: Stores) -> None:
    writer = stores.create(8192)
    ref = writer.put("a", torch.zeros(500))
    writer.cancel(ref)
    spec = TensorSpec((1000,), torch.uint8)
    with writer.protect(["a"]), writer.reserve("mine", spec):
        kept = f"{writer.stats().used_bytes} bytes protected, held by the writer or in unfinished puts"
        with raises(StoreFullError, names=[kept]):
            writer.put("b", torch.zeros(2000))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{}", ("name", "store_id", "n_readers")),
        ("[]", ("[]",)),
        ('{"name": "x", "store_id": 1, "n_readers": 1, "more": 1}', ("more",)),
        ('{"name": "x", "store_id": true, "n_readers": 1}', ("store_id",)),
        ("shmstore-1", ("shmstore-1",)),
    ],
)
def test_text_that_is_not_a_handle_says_what_is_wrong_with_it(text: str, names: tuple[str, ...]) -> None:
    with raises(ValueError, ("store handle", *names)):
        StoreHandle.from_json(text)


def test_a_wrong_dtype_or_shape_is_named() -> None:
    wrong: list[Any] = ["nonsense", None, 5, "f4,,", ("f4", -1), {"names": 1}]
    for dtype in wrong:
        with raises(TypeError, names=("dtype", "torch.dtype", repr(dtype))):
            TensorSpec((2,), dtype)
    for shape in (5, "ab", (1.5,)):
        with raises(TypeError, names=("shape", "ints", repr(shape))):
            TensorSpec(shape, torch.int8)  # type: ignore[arg-type]
