"""`make bench-vllm`: how long an item takes from the API server to all workers of a real vLLM, with each of its caches.

A time is from the call that stores the item, or looks for it and finds it, in the API server to the moment when the
last worker has the items of the request. It contains what vLLM does on the way: its messages, its scheduler. Whole
requests stand beside it. Engines take turns; each figure is a median over all turns.
"""

import argparse
import functools
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZE = (2000, 1500)
MODES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "lru": ({"SHMSTORE_VLLM": "0"}, {"mm_processor_cache_type": "lru"}),
    "lru, tensor arena": ({"SHMSTORE_VLLM": "0"}, {"mm_processor_cache_type": "lru", "enable_shm_tensor_arena": True}),
    "vLLM's shm": ({"SHMSTORE_VLLM": "0"}, {"mm_processor_cache_type": "shm"}),
    "shmstore, copies": ({"SHMSTORE_VLLM_READ": "copy"}, {"mm_processor_cache_type": "shm"}),
    "shmstore, views": ({"SHMSTORE_VLLM_READ": "views"}, {"mm_processor_cache_type": "shm"}),
}
PROBE = "SHMSTORE_BENCH_PROBE"


def register() -> None:
    """Note in each worker when it has the items of a request; vLLM calls this, as it calls any plug-in."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    apply = WorkerWrapperBase._apply_mm_cache
    file = os.open(os.environ[PROBE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @functools.wraps(apply)  # the plug-in looks at the code of vLLM's own
    def noted(self: Any, scheduler_output: Any) -> None:
        apply(self, scheduler_output)
        if scheduler_output.scheduled_new_reqs:
            os.write(file, struct.pack("<q", time.monotonic_ns()))

    WorkerWrapperBase._apply_mm_cache = noted


def measure(mode: str, workers: int, items: int, model: str) -> dict[str, list[float]]:
    """Return the times of one engine, in milliseconds, of items that it sees first, and of the same again."""
    from vllm import LLM, SamplingParams

    from tests.vllm.inputs import photograph, picture_prompt

    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=16384,
        max_num_seqs=4,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        tensor_parallel_size=workers,
        mm_processor_cache_gb=2,
        **MODES[mode][1],
    )
    cache = llm.llm_engine.renderer.mm_processor_cache
    look, send, started = cache.is_cached, cache.get_and_update_item, [0]

    def looked(mm_hashes: list[str]) -> Any:
        started[0] = time.monotonic_ns()
        return look(mm_hashes)

    def sent(mm_item: Any, mm_hash: str) -> Any:
        if mm_item is not None:  # it was processed since
            started[0] = time.monotonic_ns()
        return send(mm_item, mm_hash)

    cache.is_cached, cache.get_and_update_item = looked, sent
    probe = Path(os.environ[PROBE])
    pictures = [photograph(number, SIZE) for number in range(items + 2)]
    times: dict[str, list[float]] = {"miss": [], "hit": [], "request, miss": [], "request, hit": []}
    for kind in ("miss", "hit"):
        for number, picture in enumerate(pictures):
            seen = probe.stat().st_size if probe.exists() else 0
            begun = time.monotonic_ns()
            llm.generate([picture_prompt(picture)], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            ended = time.monotonic_ns()
            notes = [note for (note,) in struct.iter_unpack("<q", probe.read_bytes()[seen:])]
            assert len(notes) == workers
            if number >= 2:  # the first ones warm up
                times[kind].append((max(notes) - started[0]) / 1e6)
                times["request, " + kind].append((ended - begun) / 1e6)
    llm.llm_engine.engine_core.shutdown()
    llm.llm_engine.renderer.shutdown()
    return times


def one_engine(mode: str, workers: int, items: int, model: Path) -> dict[str, list[float]]:
    """Run `measure` in a process of its own, whose vLLM also finds `register` here."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder) / "shmstore_bench_probe-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shmstore-bench-probe\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nprobe = bench.vllm:register\n")
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environment |= {PROBE: f"{folder}/probe", "PYTHONPATH": f"{folder}:{ROOT}", "SHMSTORE_VLLM": "strict"}
        command = [sys.executable, "-m", "bench.vllm", "--one", mode, str(workers), str(items), str(model)]
        before = set(Path("/dev/shm").iterdir())
        done = subprocess.run(
            command,
            env=os.environ | environment | MODES[mode][0],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    for path in set(Path("/dev/shm").glob("vllm_dist_*")) - before:  # what two workers leave
        path.unlink()
    if done.returncode:
        sys.exit(f"{mode}, {workers} workers:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="how often each engine is started")
    parser.add_argument("--items", type=int, default=12, help="items of one turn")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        mode, workers, items, model = arguments.one
        print(json.dumps(measure(mode, int(workers), int(items), model)))
        return
    from tests.vllm.model import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for workers in arguments.workers:
            found: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
            for _ in range(arguments.turns):
                for mode in MODES:
                    for kind, times in one_engine(mode, workers, arguments.items, model).items():
                        found[mode].setdefault(kind, []).extend(times)
            print(f"\nTP {workers}; milliseconds, medians of {arguments.turns * arguments.items}\n")
            print("| cache | miss | hit | request, miss | request, hit |\n|---|---|---|---|---|")
            for mode, kinds in found.items():
                print(f"| {mode} | " + " | ".join(f"{statistics.median(times):.1f}" for times in kinds.values()) + " |")


if __name__ == "__main__":
    main()
