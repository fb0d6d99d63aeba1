"""A held object blocks only its own bytes: one is held forever while the ring is turned over 100 times."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError
from tests.support import Signal, Stores, alive, bits, random_tensor, span_of

CAPACITY = 64 * 1024
SIZE = 3000


def turn_over(
    writer: ObjectStoreWriter, laps: int, read: Callable[[ObjectRef], Any] | None = None, size: int = SIZE
) -> int:
    """Put until the ring has gone round `laps` times, none of it refused; `read` ends each lease. Returns the puts."""
    start = writer.stats().put_bytes
    puts = 0
    while writer.stats().put_bytes - start < laps * CAPACITY:
        ref = writer.put(f"turn-{writer.stats().next_id}", random_tensor(puts, size))
        (read or writer.cancel)(ref)
        puts += 1
    return puts


@pytest.mark.parametrize("came", [True, False])
def test_an_object_promised_to_a_rank_that_never_reads_or_never_came_costs_no_put(stores: Stores, came: bool) -> None:
    writer = stores.create(CAPACITY, n_readers=2)
    reader = stores.attach(writer, 0)
    other = stores.attach(writer, 1) if came else None
    value = random_tensor(4, 5000)
    promised = writer.put("promised", value)
    reader.get(promised)
    turn_over(writer, 100)
    assert 0 == writer.stats().refusals
    assert bits(value) == bits((other or stores.attach(writer, 1)).get(promised))


def hold(writer_handle: Any, refs: list[bytes], ready: Signal) -> None:
    reader = ObjectStoreReader.attach(writer_handle, 1)
    views = [reader.get(ObjectRef.from_bytes(packed)) for packed in refs[::2]]
    ready.send()
    Signal().wait()  # forever
    del views


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_reader_that_is_killed_or_stopped_never_blocks_the_others(stores: Stores, end: str) -> None:
    writer = stores.create(CAPACITY, n_readers=2)
    refs = [writer.put(f"k{i}", random_tensor(i, 5000)).to_bytes() for i in range(4)]
    with alive(hold, writer.handle, refs) as child:
        reader = stores.attach(writer, 0)
        for packed in refs:
            reader.release(ObjectRef.from_bytes(packed))
        if end == "kill":
            child.kill()
        else:
            child.signal(signal.SIGSTOP)

        def read_and_answer_for_rank_1(ref: ObjectRef) -> None:
            reader.get(ref)
            writer.cancel(ref)

        turn_over(writer, 20, reader.get if end == "kill" else read_and_answer_for_rank_1)
        assert 0 == writer.stats().refusals
        assert (end == "stop") == all(f"k{i}" in writer for i in range(4))
    turn_over(writer, 3, reader.get)
    assert not any(f"k{i}" in writer for i in range(4))


def test_a_refusal_says_which_rank_holds_how_many_bytes(stores: Stores) -> None:
    writer = stores.create(CAPACITY, n_readers=3)
    readers = [stores.attach(writer, rank) for rank in range(3)]
    value = random_tensor(0, 20_000)
    span = span_of("a", value)
    a, b, c = (writer.put(key, value) for key in "abc")
    views = [readers[0].get(a), readers[0].get(b)]
    readers[0].release(c)
    readers[1].get(a, copy=True)
    readers[1].release(b)
    for ref in (a, b, c):
        readers[2].release(ref)
    with pytest.raises(StoreFullError) as caught:
        writer.put("d", value)
    assert {0: 2 * span, 1: span} == caught.value.held_bytes_by_rank
    assert 20_000 == caught.value.needed
    assert f"rank 0: {2 * span} bytes, rank 1: {span} bytes" in str(caught.value)
    with pytest.raises(StoreFullError) as again:  # from memory
        writer.put("d", value)
    assert caught.value.held_bytes_by_rank == again.value.held_bytes_by_rank
    del views
    d = writer.put("d", value)
    assert {"c", "d"} <= set(writer.keys())
    readers[1].release(c)
    writer.cancel(d)
    writer.put("all of it", random_tensor(1, 60_000))
    assert ["all of it"] == writer.keys()
