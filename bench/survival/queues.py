"""What a killed process costs a queue: ``python -m bench.survival.queues`` writes a table into docs/guides/queue.md.

A producer puts, two consumers get, and one process is killed at a random moment: a consumer, the producer, or the
resource tracker of multiprocessing. Each try is alone in namespaces of its own, as the scenes are.
"""

import gc
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench.peers.queues import CONTEXT, WAYS
from bench.survival.scene import kill, processes, used

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "queue.md"
ALONE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
OWN_SHM = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
TRIES, COUNT, WORDS = 6, 400, 1 << 15
IDLE, HUNG = 3.0, 20.0
"""Seconds after which a consumer has seen the end, and after which a silent process hangs."""
VICTIMS = ("consumer", "producer", "resource_tracker")


def produce(sender: Any, said: Connection) -> None:
    import numpy as np

    for number in range(COUNT):
        sender.put(np.full(WORDS, number, np.uint64), timeout=HUNG)
        said.send(number)
    time.sleep(IDLE)  # the standard library's queue sends from a thread


def of_torch(sender: Any, said: Connection) -> None:
    import torch

    for number in range(COUNT):
        sender.put(torch.full((WORDS,), number, dtype=torch.int64), timeout=HUNG)
        said.send(number)
    time.sleep(2 * IDLE)  # until the consumers have all that was sent


def consume(receiver: Any, said: Connection) -> None:
    import numpy as np

    try:
        while True:
            found = np.asarray(receiver.get(timeout=IDLE))
            said.send(int(found[0]) if (found == found[0]).all() else "wrong bytes")
    except queue.Empty:
        pass


class Child:
    """A process and the messages that it has sent."""

    def __init__(self, act: Callable[..., None], end: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=act, args=(end, theirs))
        self.process.start()
        theirs.close()
        self.said: list[Any] = []
        self.ended = False

    def hear(self) -> None:
        try:
            self.said.append(self.pipe.recv())
        except (EOFError, OSError):
            self.ended = True


def tried(way: str, victim: str) -> dict[str, Any]:
    """Kill the victim at a random moment, and return what came of it."""
    before = used("/nowhere")
    sender, receiver = WAYS[way]()
    producer = Child(of_torch if "torch" in way else produce, sender)
    consumers = [Child(consume, receiver) for _ in range(2)]
    children = [producer, *consumers]
    producer.hear()
    at, heard = time.monotonic() + random.random() * 0.3, time.monotonic()
    killed = False
    while not all(child.ended for child in children) and time.monotonic() - heard < HUNG:
        for pipe in wait([child.pipe for child in children if not child.ended], 0.01):
            next(child for child in children if child.pipe is pipe).hear()
            heard = time.monotonic()
        if not killed and time.monotonic() > at:
            killed = True
            chosen = {"consumer": consumers[0], "producer": producer}.get(victim)
            for pid in [chosen.process.pid] if chosen else list(processes("resource_tracker")):
                kill(pid)
    hung = any(not child.ended for child in children) or (len(producer.said) < COUNT and victim != "producer")
    for child in children:
        child.process.kill()
        child.process.join()
    got = [one for child in consumers for one in child.said]
    missing = len({*producer.said} - {*got}) - (victim == "consumer")  # one was in its hands
    sender.close()
    receiver.close()
    del sender, receiver, children, producer, consumers, child  # a queue's semaphores end as garbage
    gc.collect()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    wrong = got.count("wrong bytes") + len(got) - len({*got})
    return {"hung": hung, "lost": max(0, missing), "wrong": wrong, "left": max(0, used("/nowhere") - before)}


def said(results: list[dict[str, Any]]) -> str:
    """Return what to say of several tries."""
    hung, broken = sum(one["hung"] for one in results), [one for one in results if one["lost"]]
    words = [f"hung in {hung} of {len(results)}"] if hung else []
    if broken:
        words.append(f"lost {sum(one['lost'] for one in broken)} values in {len(broken)} of {len(results)}")
    words += [f"{what} {sum(one[what] for one in results)}" for what in ("wrong",) if any(one[what] for one in results)]
    if left := max(one["left"] for one in results):
        words.append(f"left up to {left / 2**20:.1f} MiB")
    return ", ".join(words) or "nothing lost, nothing left"


def main() -> None:
    """Try each way, and write the table."""
    lines = ["| queue | " + " | ".join(f"{victim} killed" for victim in VICTIMS) + " |", "|---" * 4 + "|"]
    for way in WAYS:
        cells = []
        for victim in VICTIMS:
            results = []
            for _ in range(TRIES):
                command = [*ALONE, *OWN_SHM, sys.executable, "-m", __spec__.name, way, victim]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=PAGE.parents[2])
                results.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
            cells.append(said(results))
            print(way, victim, cells[-1], file=sys.stderr, flush=True)
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- killed: begin -->\n")
    _, end, rest = rest.partition("<!-- killed: end -->")
    PAGE.write_text(before + begin + "\n".join([*lines, ""]) + end + rest, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = folder
            print(json.dumps(tried(sys.argv[1], sys.argv[2])))
    else:
        main()
