"""Draws the pictures of guides/operators.md: a store with a stuck rank, as `shmstore dump` and `shmstore top` show it.

Run with ``python docs/screens.py``; it writes dump.svg and top.svg into guides/.
"""

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreFullError
from shmstore.cli import main as cli

GUIDES = Path(__file__).resolve().parent / "guides"
NAME = "mm-cache"


def load(writer: ObjectStoreWriter, readers: list[ObjectStoreReader], until: threading.Event) -> None:
    """Put and hit items of 0.2 to 3 MB; rank 2 reads none of the large ones, and rank 0 keeps every tenth."""
    choose = random.Random(7)
    kept = []
    for number in range(10**6):
        if until.is_set():
            break
        rows = choose.randint(64, 1024)
        with suppress(StoreFullError):
            refs = [writer.put(f"{choose.getrandbits(64):016x}", {"pixel_values": torch.zeros(rows, 768)})]
            with suppress(KeyError, IndexError):
                refs.append(writer.get_cached(choose.choice(writer.keys())))
            for ref in refs:
                value = readers[0].get(ref)
                if number % 10 == 0:
                    kept.append(value)
                    kept = kept[-4:]
                del value
                readers[1].release(ref)
                if rows < 960 or number > 250:
                    readers[2].release(ref)
        time.sleep(0.004)


def main() -> None:
    """Write the pictures."""
    with ObjectStoreWriter.create(NAME, capacity=96 << 20, n_readers=3, max_objects=256, checksums=True) as writer:
        readers = [ObjectStoreReader.attach(writer.handle, rank) for rank in range(3)]
        until = threading.Event()
        worker = threading.Thread(target=load, args=(writer, readers, until))
        worker.start()
        try:
            time.sleep(2.5)
            cli.main(["dump", NAME, "--svg", str(GUIDES / "dump.svg")])
            cli.main(["top", NAME, "--svg", str(GUIDES / "top.svg"), "--interval", "1"])
        finally:
            until.set()
            worker.join()
            for reader in readers:
                reader.close()


if __name__ == "__main__":
    main()
