"""`python -m bench.vllm_scheduler MODEL`: the KV part of a step of vLLM's scheduler, by its own managers and by ours.

64 requests run, each of them as long as the row says. In a step one of them ends and a new one comes: the same prompt
again (a hit) or another (a miss). Or all decode. The calls of the KV-cache manager are timed within vLLM's own
`schedule`, `update_from_output` and `finish_requests`; so is `add_request`, where ours takes over the block hashes.
Both schedulers take turns, step by step. MODEL is a folder with the configuration of a model for texts.
"""

import argparse
import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNNING, BLOCK = 64, 16
CALLS = ("get_computed_blocks", "allocate_slots", "get_blocks", "free", "cache_blocks")


class Timed:
    """One scheduler, whose calls of its manager are timed."""

    def __init__(self, scheduler_cls: Any, config: Any, groups: Any) -> None:
        from tests.vllm.lockstep import Engine

        self.engine = Engine(scheduler_cls, config, groups)
        self.engine.hasher = hashes
        self.ns: dict[str, int] = defaultdict(int)
        manager = self.engine.scheduler.kv_cache_manager
        for name in CALLS:
            setattr(manager, name, self.timed(name, getattr(manager, name)))
        for name in ("add_request", "schedule"):
            setattr(self.engine.scheduler, name, self.timed(name, getattr(self.engine.scheduler, name)))

    def note(self, found: dict[str, list[float]], kind: str) -> None:
        """Add the microseconds of a step to what was found."""
        found[f"{kind}, whole schedule()"].append(self.ns["schedule"] / 1e3)
        found[kind].append(sum(self.ns[call] for call in (*CALLS, "add_request")) / 1e3)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        ns, clock = self.ns, time.perf_counter_ns

        def timed(*args: Any, **named: Any) -> Any:
            start = clock()
            answer = call(*args, **named)
            ns[name] += clock() - start
            return answer

        return timed


def hashes(request: Any) -> list[bytes]:
    """Hash full blocks, faster than vLLM does: what is measured here comes after it."""
    known, prompt = len(request.block_hashes), request.cache_salt
    return [hashlib.sha256(f"{prompt} {i}".encode()).digest() for i in range(known, request.num_tokens // BLOCK)]


def measure(length: int, rounds: int, model: Path) -> dict[str, dict[str, list[float]]]:
    """Return microseconds of each call in each round, for each scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler as Theirs

    from shmstore.integrations.vllm.scheduler import Scheduler
    from tests.vllm.lockstep import full, kv_cache_config, vllm_config

    blocks = (RUNNING + 8) * (length // BLOCK + rounds // 2 + 8)
    settings = {"max_model_len": length + 1024, "max_num_seqs": RUNNING, "max_num_batched_tokens": length + 1024}
    both = {
        name: Timed(cls, vllm_config(model, blocks, **settings), kv_cache_config(blocks, full(BLOCK)))
        for name, cls in (("vLLM's", Theirs), ("shmstore's", Scheduler))
    }
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in both}
    for number in range(RUNNING):
        for one in both.values():
            one.engine.add(f"r{number}", [7] * length, 1000, cache_salt=f"p{number}")
            one.engine.step()
            one.engine.step()
    for number in range(RUNNING, RUNNING + 2 * rounds):
        kind = "hit" if number % 2 else "miss"
        for name, one in both.items():
            one.ns.clear()
            one.engine.abort(f"r{number - RUNNING}")
            prompt = f"p{number - RUNNING}" if kind == "hit" else f"p{number}"
            one.engine.add(f"r{number}", [7] * length, 1000, cache_salt=prompt)
            one.engine.step()
            one.note(found[name], kind)
            one.ns.clear()
            one.engine.step()
            one.note(found[name], "decode")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    arguments = parser.parse_args()
    print("| tokens | step | vLLM's, us | shmstore's, us | change |\n|---:|---|---:|---:|---:|")
    for length in arguments.lengths:
        theirs, ours = measure(length, arguments.rounds, arguments.model).values()
        for call in theirs:
            a, b = statistics.median(theirs[call]), statistics.median(ours[call])
            print(f"| {length} | {call} | {a:.0f} | {b:.0f} | {b / a - 1 if a else 0:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
