"""What survives: each way to share tensors on a host, each of whose processes is killed while the others work.

    make survival                                        # writes the table of docs/concepts/reliability.md
    .venv/bin/python -m bench.survival Redis Lmdb        # these alone; prints it

Of each way there are a writer and two readers, processes of their own, and what it has beside them. The objects have
4 MiB, and a store has room for eight. `scene.py` says what happens. Each scene has processes and a /dev/shm of its own
(Linux's namespaces, with unshare(1)), so that what is left there is known, and goes.

vLLM's ways run in VLLM_VENV, which `make test-vllm` makes; Ray needs the extra `bench`. A way that cannot run is left
out, and said; then the page stays as it is.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.survival import mooncake_store, ray_objects, vllm_own, ways
from bench.survival.scene import Report, Way

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "concepts" / "reliability.md"
BEGIN, END = "<!-- survival: begin -->\n", "<!-- survival: end -->"
COLUMNS = (
    "",
    "a reader is killed: the others",
    "the writer is killed: stored, not read",
    "a new writer: what was stored",
    "what runs beside is killed: the others",
    "left",
)
WAYS: list[type[Way]] = [
    ways.Shmstore,
    ways.Blocks,
    ways.TorchDescriptors,
    ways.TorchNames,
    vllm_own.ShmCache,
    vllm_own.ExampleConnector,
    ray_objects.Ray,
    mooncake_store.Mooncake,
    ways.Redis,
    ways.Iceoryx,
    ways.Lmdb,
]
ALONE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
OWN_SHM = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
LONGEST = 1800.0
"""Seconds of a scene with all that can hang in it."""


class FailedError(Exception):
    """A scene has no report."""


def played(way: type[Way], victim: str) -> Report:
    python = f"{os.environ[way.venv]}/bin/python" if way.venv else sys.executable
    scene = [python, "-m", "bench.survival.scene", f"{way.__module__}:{way.__name__}", victim]
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        done = subprocess.run(
            [*ALONE, *OWN_SHM, *scene, folder], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST
        )
    if done.returncode != 0:
        raise FailedError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def row(way: type[Way]) -> list[str]:
    reports = {victim: played(way, victim) for victim in ("reader", "writer", *way.servers)}
    reader, writer = reports["reader"], reports["writer"]
    beside = []
    for name in way.servers:
        said = f"{name}: {reports[name]['others']}"
        beside.append(said + (f"; restarted: {reports[name]['again']}" if "again" in reports[name] else ""))
    left = [f"{report['left']} ({victim})" for victim, report in reports.items() if report["left"]]
    return [
        way.title,
        reader["others"],
        writer["stored"],
        writer["again"],
        ". ".join(beside) or "there is nothing",
        ", ".join(left) or "nothing",
    ]


def main() -> None:
    chosen = [way for way in WAYS if not sys.argv[1:] or way.__name__ in sys.argv[1:]]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for way in chosen:
        try:
            lines.append("| " + " | ".join(row(way)) + " |")
            print(lines[-1], flush=True)
        except (FailedError, KeyError, OSError) as error:
            print(f"{way.title} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    if len(lines) == 2 + len(WAYS):
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + begin + "\n".join([*lines, ""]) + "".join(rest.partition(END)[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
