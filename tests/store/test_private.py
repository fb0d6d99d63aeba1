"""Private values: writable, over a copy-on-write mapping that nobody else sees and that pins its object."""

import errno
import gc
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import (
    MsgpackSerde,
    ObjectStoreReader,
    ObjectStoreWriter,
    SharedMemoryError,
)
from tests.store.test_lifetime import CAPACITY
from tests.support import Stores, bits, frozen, in_child, is_held, raises, random_tensor

VALUE: dict[str, Any] = {
    "t": random_tensor(1, 5000),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "a": np.arange(300, dtype="<i2"),
    "s": "text",
}


def mappings(name: str) -> int:
    """Return how many private mappings of the store this process has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/dev/shm/{name}" in line and line.split()[1] == "rw-p" for line in lines)


def overwrite(value: dict[str, Any]) -> None:
    value["t"].fill_(9)
    value["half"].zero_()
    value["a"][:] = -1


@pytest.mark.parametrize("capacity", [CAPACITY, 4 << 20], ids=["small pages", "at an address for huge pages"])
def test_a_write_is_seen_by_nobody_else(stores: Stores, capacity: int) -> None:
    writer = stores.create(capacity, n_readers=2)
    reader, other = stores.attach(writer), stores.attach(writer, 1)
    values = [{**VALUE, "number": number} for number in range(4)]
    refs = [writer.put(f"{number}", value) for number, value in enumerate(values)]
    before, again = reader.get(refs[1]), reader.get(refs[1], private=True)
    mine = reader.get(refs[1], private=True)
    assert frozen(values[1]) == frozen(mine)
    assert 2 == mappings(writer.name)  # one for each get, whatever the number of tensors
    assert {0} == {mine[name].data_ptr() % 64 for name in ("t", "half")} | {mine["a"].ctypes.data % 64}
    overwrite(mine)
    assert {9} == set(mine["t"].tolist())
    assert {-1} == set(mine["a"].tolist())
    assert frozen(values) == frozen([reader.get(ref) for ref in refs])
    assert frozen(values[1]) == frozen(before) == frozen(again)
    assert frozen(values) == frozen([other.get(ref) for ref in refs])
    writer.check_valid()


def test_a_get_acknowledges_its_lease_and_counts(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    ref = writer.put("k", VALUE)
    private = reader.get(ref, private=True)
    assert (1, 1, 1) == (reader.stats().gets, reader.stats().live_views, mappings(writer.name))
    assert not reader.release(ref)
    assert is_held(writer)
    del private
    assert not is_held(writer)


def test_it_excludes_a_copy_and_a_device(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    ref = writer.put("k", VALUE)
    options: list[dict[str, Any]] = [{"copy": True}, {"device": "cpu"}, {"device": "cuda"}]
    for option in options:
        with raises(TypeError, names=["private", "copy", "device"]):
            reader.get(ref, private=True, **option)
    assert 0 == reader.stats().gets


class Another(MsgpackSerde):
    """A serializer that may do anything when it decodes."""


def test_another_serializer_copies(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer, serde=Another())
    value = reader.get(writer.put("k", VALUE), private=True)
    assert (0, False) == (mappings(writer.name), is_held(writer))
    overwrite(value)


def test_without_memory_for_the_mapping_the_lease_stays_open(name: str) -> None:
    def get_without_memory() -> list[int | None]:
        with ObjectStoreWriter.create(name, capacity=128 << 20, n_readers=1) as writer:
            reader = ObjectStoreReader.attach(writer.handle)
            ref = writer.put("k", torch.ones(100 << 20, dtype=torch.uint8))
            mapped, limits = (
                int(Path("/proc/self/statm").read_text().split()[0]),
                resource.getrlimit(resource.RLIMIT_AS),
            )
            resource.setrlimit(resource.RLIMIT_AS, (mapped * resource.getpagesize() + (64 << 20), limits[1]))
            with raises(SharedMemoryError, hint=["RLIMIT_AS", "vm.max_map_count", "copy=True"]) as caught:
                reader.get(ref, private=True)
            told = [caught.value.errno, reader.stats().gets, reader.stats().live_views, writer.stats().open_leases]
            resource.setrlimit(resource.RLIMIT_AS, limits)
            told.append(int(reader.get(ref, private=True).sum()))
            reader.close()
        return told

    assert [errno.ENOMEM, 0, 0, 1, 100 << 20] == in_child(get_without_memory)


# ---- the end of the mapping


def test_a_value_outlives_its_reader(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = ObjectStoreReader.attach(writer.handle)
    value = reader.get(writer.put("k", VALUE), private=True)
    reader.close()
    assert is_held(writer)
    half, t = value["half"][2:], value["t"]
    del value
    t += 1
    assert bits(VALUE["t"] + 1) == bits(t)
    del t
    assert (1, True) == (mappings(writer.name), is_held(writer))
    assert bits(VALUE["half"][2:]) == bits(half)
    del half
    assert (0, False) == (mappings(writer.name), is_held(writer))


AT_EXIT = """
    import sys, torch
    from shmstore import ObjectStoreReader, ObjectRef
    reader = ObjectStoreReader.attach(sys.argv[1])
    value = reader.get(ObjectRef.from_bytes(bytes.fromhex(sys.argv[2])), private=True)
    value["t"].fill_(3)
    value["me"] = value
"""


def test_a_value_that_is_there_at_the_exit_holds_nothing_any_more(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    ref = writer.put("k", VALUE)
    script = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(AT_EXIT), writer.name, ref.to_bytes().hex()]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True)
    assert (0, "") == (done.returncode, done.stderr)
    assert not is_held(writer)


def test_a_forked_child_has_the_mapping_and_not_the_pin(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    values = [reader.get(writer.put("k", VALUE), private=True)]
    values[0]["t"][0] = 77
    expected = frozen(values[0])

    def use_and_drop() -> list[Any]:
        seen = frozen(values[0]) == expected
        overwrite(values[0])
        values.clear()
        gc.collect()
        return [seen, mappings(writer.name)]

    assert [True, 0] == in_child(use_and_drop)
    assert expected == frozen(values[0])
    assert is_held(writer)
    values.clear()
    assert not is_held(writer)
