"""The NUMA node of a store's data: chosen at the creation, for all that take an arena, or refused by a typed error."""

import ctypes
import errno
import platform
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import LayoutMismatchError, ObjectStoreReader, ObjectStoreWriter, SharedMemoryError
from shmstore.bindings.store import MAX_NODE, check_node
from shmstore.inspect.inspector import StoreInspector
from tests.support import Stores, in_child, raises, segments, store_name

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"capacity": 4 * MIB, "n_readers": 1, "n_writers": 3}
MAPS = Path("/proc/self/numa_maps")
MBIND = {"x86_64": 237, "aarch64": 235}


def _why_not() -> str:
    """Return why no node can be chosen here; empty if it can."""
    try:
        check_node(0)
    except SharedMemoryError as error:
        return str(error)
    return "" if MAPS.exists() else f"no {MAPS}"


needs_nodes = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def placed(name: str) -> list[dict[str, str]]:
    """Return the policy of each mapping of the store in this process, and the numbers of its pages by node."""
    lines = [line.split() for line in MAPS.read_text().splitlines() if f"file=/dev/shm/{name} " in line]
    return [{"policy": words[1], **dict(word.split("=", 1) for word in words[2:] if "=" in word)} for words in lines]


def use(writer: ObjectStoreWriter) -> list[dict[str, str]]:
    """Put an object and read it; return where the mappings with its pages are."""
    writer.clear()
    with ObjectStoreReader.attach(writer.handle) as reader:
        value = np.ones(2 * MIB, np.uint8)
        assert np.array_equal(value, reader.get(writer.put("a", value)))
        return [found for found in placed(writer.name) if int(found.get("dirty", "0")) >= 512]


def join_and_use(store: Any) -> list[dict[str, str]]:
    with ObjectStoreWriter.join(store) as writer:
        return use(writer)


@needs_nodes
@pytest.mark.parametrize("more", [{}, {"prefault": True, "huge_pages": True}, {"writes": False}])
def test_the_data_is_on_the_node_whichever_process_takes_the_arena(
    stores: Stores, name: str, more: dict[str, Any]
) -> None:
    first = stores.create(name=name, **OPTIONS, **more, numa_node=0)
    taken = [] if "writes" in more else use(first)
    taken += in_child(join_and_use, first.handle)
    first.close(unlink=False)
    with ObjectStoreWriter.open(name, **OPTIONS, numa_node=0) as again:
        taken += use(again)
    assert len(taken) >= 2
    assert {"prefer:0"} == {found["policy"] for found in taken}
    assert {"N0"} == {key for found in taken for key in found if key[1:].isdigit()}


@needs_nodes
def test_without_a_node_the_kernel_chooses_and_only_the_other_is_told(stores: Stores) -> None:
    found = use(stores.create(**OPTIONS))
    assert {"default"} == {one["policy"] for one in found}
    for options, said in (({}, ()), ({"numa_node": 0, "checksums": True}, ("checksums", "numa_node=0"))):
        with StoreInspector.open(stores.create(**OPTIONS, **options).name) as inspector:
            assert said == inspector.facts().options


@needs_nodes
@pytest.mark.parametrize("call", [ObjectStoreWriter.create, ObjectStoreWriter.open])
def test_a_node_that_is_not_there_is_one_typed_error_and_leaves_nothing(call: Any) -> None:
    nodes = re.findall(r"Mems_allowed_list:\s*(\S+)", Path("/proc/self/status").read_text())[0]
    said = "one node only" if nodes == "0" else "nodes"
    before = segments()
    with raises(SharedMemoryError, names=[str(MAX_NODE), said, nodes], hint=["numa_node"]) as caught:
        call(store_name(), **OPTIONS, numa_node=MAX_NODE)
    assert errno.EINVAL == caught.value.errno
    assert before == segments()


@needs_nodes
def test_a_node_that_is_not_there_costs_no_store_that_is(stores: Stores, name: str) -> None:
    writer = stores.create(name=name, **OPTIONS)
    writer.put("a", 1)
    writer.close(unlink=False)
    for on_mismatch in ("recreate", "accept"):
        with pytest.raises(SharedMemoryError):
            ObjectStoreWriter.open(name, **OPTIONS, numa_node=MAX_NODE, on_mismatch=on_mismatch)
    with pytest.raises(LayoutMismatchError, match="numa_node is None, not 0"):
        ObjectStoreWriter.open(name, **OPTIONS, numa_node=0, on_mismatch="raise")
    assert ["a"] == stores.recover(name).keys()


def forbid(call: int) -> None:
    """Have the kernel answer that system call with EPERM from now on, as the seccomp profile of a container does."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(packed)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert 0 == libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, program, 0, 0), ctypes.get_errno()


def in_a_container(store: Any) -> tuple[str, str, int | None]:
    forbid(MBIND[platform.machine()])
    with pytest.raises(SharedMemoryError) as caught:
        ObjectStoreWriter.create(store_name(), **OPTIONS, numa_node=0)
    assert {"prefer:0"} == {found["policy"] for found in join_and_use(store)}
    return str(caught.value), caught.value.hint, caught.value.errno


@needs_nodes
def test_a_container_that_may_choose_no_node_is_told_what_it_lacks_and_may_join(stores: Stores) -> None:
    said, hint, number = in_child(in_a_container, stores.create(**OPTIONS, numa_node=0).handle)
    assert ("mbind" in said, "SYS_NICE" in hint, errno.EPERM) == (True, True, number)
