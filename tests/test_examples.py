"""The examples run, print what they should, and leave nothing behind."""

import multiprocessing
import signal
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from examples import pipeline
from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter
from tests.support import SHM

EXAMPLES = Path(__file__).parents[1] / "examples"
spawn = multiprocessing.get_context("spawn")


def run(example: str) -> list[str]:
    """Run an example and all of its processes, which share its pipes, to their ends; return its lines."""
    command = [sys.executable, str(EXAMPLES / example)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        out, err = running.communicate(timeout=120)
    assert (0, "") == (running.returncode, err)
    assert not [*SHM.glob(f"*-{running.pid}*")]
    return out.splitlines()


def test_the_small_engine_survives_its_api_server_and_decodes_nothing_again() -> None:
    assert len((EXAMPLES / "engine.py").read_text().splitlines()) < 200
    rejected, *answers, stats = run("engine.py")
    assert rejected.startswith("rejected, request 0")
    total = 8 * 3 * 64 * 64 * (len("beach") + len("mountain"))
    expected = []
    for request, samples, decoded in ((1, 1, 2), (2, 3, 2), (3, 1, 0)):  # the last one after the kill
        found = [[(request, rank, total) for rank in range(2)]] * samples
        expected.append(f"answers: {found}, clips decoded: {decoded}")
    assert expected == answers
    assert "CacheInfo(hits=2, total=2), open leases: 0" == stats


def test_the_pipeline_reads_all_in_order_though_a_worker_is_killed() -> None:
    lines = run("pipeline.py")
    assert ["worker 1 died before it sent 15"] == [line for line in lines if "batch" not in line]
    batches = [f"a batch: {[*range(first, first + 4)]}" for first in range(0, 24, 4)]
    assert batches == [line for line in lines if "batch" in line]


def test_the_queue_of_frames_loses_none_though_a_camera_and_a_worker_are_killed() -> None:
    assert ["30 frames wait, 0 were seen", "0 frames wait, 30 were seen", "True"] == run("frames.py")


def test_what_a_killed_worker_of_the_pipeline_has_sent_can_be_read_while_the_next_one_stores() -> None:
    with ExitStack() as end:
        owner = ObjectStoreWriter.create(capacity=pipeline.CAPACITY, n_readers=1, n_writers=1, writes=False)
        end.enter_context(owner)
        reader = end.enter_context(ObjectStoreReader.attach(owner.handle, rank=0))

        def start(first: int) -> tuple[SpawnProcess, Connection]:
            results, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=pipeline.worker, args=(owner.handle, 0, range(first, 100), theirs))
            process.start()
            end.callback(process.join)
            end.callback(process.kill)
            theirs.close()
            return process, results

        def received(results: Connection) -> ObjectRef:
            return ObjectRef.from_bytes(results.recv_bytes())

        room = pipeline.HELD + pipeline.AHEAD + 1
        first, results = start(0)
        refs = [received(results) for _ in range(room)]  # its space is full
        first.kill()
        first.join()
        _, results = start(room)
        assert room - 1 == reader.get(refs.pop()).max()  # makes room for one array, and drops it
        late = received(results)  # now the second one has stored it
        for number, ref in enumerate(refs):
            assert number == reader.get(ref).max()
        assert room == reader.get(late).max()


def test_the_workers_of_the_pipeline_end_if_main_is_killed() -> None:
    """They wait for room for 60 s at most, but the room of a dead reader is free at once."""
    program = "import os; from examples import pipeline; pipeline.print = lambda *_: os.kill(os.getpid(), 9)"
    running = subprocess.Popen([sys.executable, "-c", f"{program}; pipeline.main()"], stderr=subprocess.PIPE, text=True)
    with running:
        _, err = running.communicate(timeout=50)  # until the last of its processes has ended
    assert -signal.SIGKILL == running.returncode
    assert pipeline.WORKERS == err.count("BrokenPipeError: ")
    assert not [*SHM.glob(f"*-{running.pid}-*")]


def test_the_store_of_the_pipeline_goes_if_main_ends_early() -> None:
    program = "from examples import pipeline; pipeline.COUNT = 4000; pipeline.print = lambda *_: 1 / 0; pipeline.main()"
    running = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    with running:
        _, err = running.communicate(timeout=50)
    assert "ZeroDivisionError" in err
    assert not [*SHM.glob(f"*-{running.pid}-*")]


def test_two_training_jobs_decode_each_sample_once() -> None:
    said = "".join(run("dataset.py"))  # two jobs print, and if Python buffers nothing, an end of line may come late
    total = 3 * 96 * 96 * sum(range(48))
    expected = [f"job {job}, epoch {epoch}: all pixels together are {total}" for job in (0, 1) for epoch in (0, 1)]
    assert [1] * 4 == [said.count(line) for line in expected]
    assert said.endswith("2 jobs, 2 epochs, 48 samples: 48 were decoded")


def test_a_service_renders_each_image_in_one_of_its_workers() -> None:
    assert ["96 answers, 8 images, rendered 8 times"] == run("service.py")
