"""Four real worker processes on one sender; one is killed in the middle."""

import os
import random
import signal
from multiprocessing.connection import wait
from typing import Any

from tests.multimodal import worker
from tests.multimodal.helpers import MIB, config, shm_sender, update
from tests.support import FRESH

WORKERS = 4
KILLED = 2
REQUESTS = 400
WINDOW = 6


def test_four_workers_overlapping_requests_and_one_killed_in_the_middle() -> None:
    rng = random.Random(1)
    settings = config(MIB, 3 * MIB, cache_type="shm", shm_max_object_size_mb=1, world_size=WORKERS)
    universe = [f"{n}:{rng.choice([100, 10_000, 100_000, 400_000])}" for n in range(40)] + [f"99:{2 * MIB}"]
    processes: list[Any] = []
    pipes: list[Any] = []
    with shm_sender(settings) as sender:
        try:
            for rank in range(WORKERS):
                mine, theirs = FRESH.Pipe()
                process = FRESH.Process(target=worker.main, args=(theirs, settings, rank, sender.handle))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            for pipe in pipes:
                assert pipe.recv() == "attached"

            alive = set(range(WORKERS))
            waiting: dict[int, set[int]] = {}  # request -> ranks that have not answered, and what was sent
            answers = released = 0

            def answer_of(rank: int) -> None:
                nonlocal answers
                request, right = pipes[rank].recv()
                assert right, f"request {request} at rank {rank}"
                answers += 1
                waiting[request].discard(rank)
                if not waiting[request]:
                    del waiting[request]

            for request in range(REQUESTS):
                mm_hashes = rng.choices(universe, k=rng.randint(1, 4))
                cached = sender.is_cached(mm_hashes)
                inputs = [
                    None if hit else (worker.truth(h), [update(h)]) for h, hit in zip(mm_hashes, cached, strict=True)
                ]
                outputs = sender.get_and_update(inputs, mm_hashes)
                assert [[update(h)] for h in mm_hashes] == [updates for _, updates in outputs]
                sent = [piece for piece, _ in outputs]
                if rng.random() < 0.1:
                    released += sender.release(sent)
                    continue
                if request == REQUESTS // 2:
                    os.kill(processes[KILLED].pid, signal.SIGKILL)
                    processes[KILLED].join()
                    alive.discard(KILLED)
                    for request_, ranks in list(waiting.items()):
                        ranks.discard(KILLED)
                        if not ranks:
                            del waiting[request_]
                waiting[request] = set(alive)
                for rank in alive:
                    pipes[rank].send((request, mm_hashes, sent))
                while len(waiting) > WINDOW:
                    for pipe in wait([pipes[rank] for rank in alive], timeout=60):
                        answer_of(pipes.index(pipe))
            while waiting:
                ready = wait([pipes[rank] for rank in alive], timeout=60)
                assert ready, f"stuck: {waiting}"
                for pipe in ready:
                    answer_of(pipes.index(pipe))
            assert alive == {0, 1, 3}
            assert answers > REQUESTS * 2
            assert released > 0
            stats = sender.writer.stats()
            assert stats.evictions > 0
            assert sender.inline_too_large > 0
            assert sender.make_stats().hits > 0
            # Three workers live and one is dead, and no lease and no pin is left: what is deleted is free at once.
            sender.clear_cache()
            stats = sender.writer.stats()
            assert (0, 0, 0) == (stats.objects, stats.used_bytes, stats.open_leases)
            for rank in alive:
                pipes[rank].send(None)
                assert pipes[rank].recv() == "done"
                processes[rank].join(60)
                assert processes[rank].exitcode == 0
            sender.writer.check_valid()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
