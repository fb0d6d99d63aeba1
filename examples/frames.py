"""A queue of frames: two cameras put, two workers take, and one of each is killed. No frame is lost, and nothing hangs.

docs/guides/queue.md explains each part. Run it: `python frames.py`.
"""

import multiprocessing
import os
import queue
import signal
from contextlib import suppress

import numpy as np

import shmstore


def camera(frames: shmstore.Queue, first: int, dies: bool = False) -> None:
    """Put twenty frames of a megabyte, or be killed after ten of them."""
    for number in range(first, first + 20):
        if dies and number == first + 10:
            os.kill(os.getpid(), signal.SIGKILL)
        frames.put(np.full((512, 682, 3), number, np.uint8))  # one copy, into shared memory


def worker(frames: shmstore.Queue, results: shmstore.Queue, dies: bool = False) -> None:
    """Add up each frame where it lies, or be killed with one in its hands."""
    while not frames.empty():
        with suppress(queue.Empty), frames.get(timeout=0.2, ack=True) as frame:  # comes again if this process dies here
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            results.put(int(frame.mean()))


def main() -> None:
    """Run the cameras, then the workers, and print what was seen."""
    spawn = multiprocessing.get_context("spawn")
    with shmstore.Queue("64 MiB") as frames, shmstore.Queue("1 MiB") as results:
        for target, several in (
            (camera, [(frames, 0), (frames, 100, True)]),
            (worker, [(frames, results), (frames, results, True)]),
        ):
            started = [spawn.Process(target=target, args=args) for args in several]
            for process in started:
                process.start()
            for process in started:
                process.join()
            print(f"{frames.qsize()} frames wait, {results.qsize()} were seen")
        print(sorted(results) == [*range(20), *range(100, 110)])


if __name__ == "__main__":
    main()
