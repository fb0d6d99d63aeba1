"""Three writers and four ranks in two groups deal at random, and are killed at random moments and started again.

A value says what its bytes must be, so a reader can tell whether a byte has changed. References go through memory that
all processes share: a writer stores one, torn or not, and any rank may read it.
"""

import mmap
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from shmstore import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StaleRefError,
    StoreFullError,
)
from shmstore.inspect.verify import verify
from tests.support import Child, bits, random_tensor

WRITERS, RANKS, GROUPS, KEYS = 3, 4, [2, 2], 60
CAPACITY = 64 << 10
CELL, CELLS = 40, 64
COUNTS = WRITERS * CELLS * CELL
"""Offset of the rounds that each process has done."""


@cache
def content(key: int) -> Any:
    return random_tensor(key, 300 + key * 7919 % 4000)


def check(value: Any) -> None:
    assert bits(content(value["key"])) == bits(value["x"]), value["key"]


class Board:
    """Memory that processes share; a writer has a row of references."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, COUNTS + 8 * (WRITERS + RANKS))

    def post(self, row: int, cell: int, ref: ObjectRef) -> None:
        at = (row * CELLS + cell) * CELL
        self._map[at : at + CELL] = ref.to_bytes()

    def take(self, cell: int) -> ObjectRef:
        return ObjectRef.from_bytes(self._map[cell * CELL : (cell + 1) * CELL])

    def count(self, process: int) -> int:
        at = COUNTS + 8 * process
        return int.from_bytes(self._map[at : at + 8], "little")

    def counted(self, process: int) -> None:
        at = COUNTS + 8 * process
        self._map[at : at + 8] = (self.count(process) + 1).to_bytes(8, "little")


def write(name: str, board: Board, process: int, seed: int) -> None:
    """Be a writer until killed."""
    chance = random.Random(seed)
    writer = ObjectStoreWriter.open(
        name, capacity=CAPACITY, n_readers=RANKS, groups=GROUPS, n_writers=WRITERS, max_objects=64
    )
    writer.check_valid()
    refs: list[ObjectRef] = []
    while True:
        key, group = chance.randrange(KEYS), chance.choice([None, 0, 1])
        try:
            if writer.is_cached(str(key)):
                ref = writer.get_cached(str(key), group=group, hold=chance.random() < 0.1)
            else:
                ref = writer.put(str(key), {"key": key, "x": content(key)}, group=group)
            refs.append(ref)
            board.post(writer.index, chance.randrange(CELLS), ref)
        except StoreFullError:
            refs.clear()
            writer.cancel_all()
        except (ObjectNotFoundError, ObjectExistsError):
            pass  # another writer has evicted or stored it meanwhile
        if len(refs) > 8:
            with suppress(StaleRefError):
                writer.cancel(refs.pop(chance.randrange(len(refs))))
        if chance.random() < 0.02:
            writer.delete(str(chance.randrange(KEYS)))
        board.counted(process)


def read(name: str, board: Board, process: int, seed: int) -> None:
    """Be a rank until killed."""
    chance = random.Random(seed)
    reader = ObjectStoreReader.attach(name, process - WRITERS)
    views: list[Any] = []
    while True:
        ref = board.take(chance.randrange(WRITERS * CELLS))
        with suppress(StaleRefError):
            if chance.random() < 0.3:
                reader.release(ref)
            else:
                views.append(reader.get(ref))
                check(views[-1])
        if len(views) > 4:
            check(views.pop(chance.randrange(len(views))))
        board.counted(process)


@pytest.mark.parametrize("kills", [24, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_processes_killed_at_random_cost_nothing_but_their_unfinished_puts(name: str, kills: int) -> None:
    chance, board = random.Random(kills), Board()
    for key in range(KEYS):
        content(key)  # before the forks
    options: dict[str, Any] = {"capacity": CAPACITY, "n_readers": RANKS, "groups": GROUPS, "max_objects": 64}
    ObjectStoreWriter.create(name, **options, n_writers=WRITERS).close(unlink=False)
    lives: list[Callable[..., None]] = [write] * WRITERS + [read] * RANKS

    def start(process: int) -> Child:
        return Child(lives[process], name, board, process, chance.random())

    def await_rounds(process: int, rounds: int) -> None:
        wanted, end = board.count(process) + rounds, time.monotonic() + 60
        while board.count(process) < wanted:
            if os.waitid(os.P_PID, running[process].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                running[process].join()  # raises what went wrong
            assert time.monotonic() < end, f"process {process} makes no progress"
            time.sleep(0.0005)

    running = [start(process) for process in range(WRITERS + RANKS)]
    died, rounds = [0] * len(running), 0
    try:
        for number in range(kills):
            process = chance.randrange(len(running))
            await_rounds(process, chance.choice([0, 1, 10, 50]))
            time.sleep(chance.random() * 0.003)
            running[process].kill()
            died[process] += 1
            running[process] = start(process)
            if number % 20 == 0:
                report = verify(name)
                assert not [finding for finding in report.findings if finding.wrong], report
        for process in range(len(running)):
            await_rounds(process, 20)  # all are well
            rounds += board.count(process)
    finally:
        for child in running:
            child.kill()

    writers = [ObjectStoreWriter.join(name, index) for index in range(WRITERS)]
    found = adopted = 0
    try:
        with ObjectStoreReader.attach(name, 0) as reader:
            for writer in writers:
                writer.check_valid()
                stats = writer.stats()
                adopted += stats.adopted
                missing = stats.puts - stats.evictions - stats.deletes - len(writer)
                assert abs(missing) <= sum(died[:WRITERS]) + WRITERS, "a death may come between an act and its count"
                for text in writer.keys():
                    check(reader.get(writer.get_cached(text)))
                    found += 1
        assert verify(name).ok
        for writer in writers:
            writer.cancel_all()
        for writer in writers:  # no lease and no pin is left
            with writer.reserve("all", random_tensor(0, CAPACITY - 256)):
                pass
            assert ["all"] == writer.keys()
            writer.check_valid()
    finally:
        for writer in writers:
            writer.close()
    assert adopted > 0
    print(f"{kills} kills {died}: {rounds} rounds, {adopted} adopted, {found} objects found at the end")
