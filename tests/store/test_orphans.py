"""A process is dead when it is dead: the children that it forked keep none of its ranks, and not its store."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter

CAPACITY = 64 * 100

READER = """
import os, signal, sys
from shmstore import ObjectRef, ObjectStoreReader
reader = ObjectStoreReader.attach(sys.argv[1], 0)
view = reader.get(ObjectRef.from_bytes(bytes.fromhex(sys.argv[2])))
"""
WRITER = """
import os, signal, sys
import numpy as np
from shmstore import ObjectStoreWriter
writer = ObjectStoreWriter.create(sys.argv[1], capacity=6400, n_readers=1)
writer.put("k", np.arange(8))
"""
FORK = """
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


@contextmanager
def killed_with_a_child_left(script: str, *arguments: str) -> Iterator[None]:
    """Run the script in a process that forks; inside the block it is dead by SIGKILL and its child is alive."""
    command = [sys.executable, "-c", script + FORK, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            assert process.wait() == -signal.SIGKILL
            os.kill(child, 0)
            yield
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_a_killed_reader_held_is_free_though_its_child_lives() -> None:
    with ObjectStoreWriter.create(capacity=CAPACITY, n_readers=1) as writer:
        ref = writer.put("held", np.zeros(CAPACITY // 2, np.uint8))
        with killed_with_a_child_left(READER, writer.name, ref.to_bytes().hex()):
            assert isinstance(writer.put("other", np.zeros(CAPACITY // 2, np.uint8)), ObjectRef)
            ObjectStoreReader.attach(writer.handle, 0).close()


def test_the_store_of_a_killed_writer_is_recovered_though_its_child_lives() -> None:
    name = f"orphan-{os.getpid()}"
    with killed_with_a_child_left(WRITER, name), ObjectStoreWriter.recover(name) as writer:
        assert writer.keys() == ["k"]
