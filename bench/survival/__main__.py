"""What survives: each way to share tensors on a host, each of whose processes is killed while the others work.

    make survival                              # writes the table of docs/concepts/reliability.md
    make survival ARGS='Redis Lmdb'            # these rows alone

Of each way there are a writer and two readers, processes of their own, and what runs next to them. The objects have
4 MiB, and a store has room for eight. `scene.py` says what happens. Each scene has processes and a /dev/shm of its own
(Linux's namespaces, with unshare(1)), so that what is left there is known, and goes.

vLLM's ways run in VLLM_VENV, which `make test-vllm` makes; Ray needs the extra `bench`. A way that cannot run is said,
and its row stays as it is.
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
    "reader killed: the others",
    "writer killed: stored, not read",
    "a new writer finds it",
    "killed inside a put: of 10",
    "helper killed: the others",
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
    last = (done.stdout.splitlines() or [""])[-1]
    if not last.startswith("{"):
        raise FailedError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    report: Report = json.loads(last)
    print(way.__name__, victim, report, file=sys.stderr)
    return report


def row(way: type[Way]) -> list[str]:
    finds = () if way.find is Way.find else ("midway",)
    reports = {victim: played(way, victim) for victim in ("reader", "writer", *finds, *way.servers)}
    reader, writer = reports["reader"], reports["writer"]
    beside = []
    for name in way.servers:
        said = f"{name}: {reports[name]['others']}"
        beside.append(said + (f"; restarted: {reports[name]['again']}" if "again" in reports[name] else ""))
    left = [f"{report['left']} ({victim})" for victim, report in reports.items() if report.get("left")]
    return [
        way.title,
        reader["others"],
        writer["stored"],
        writer["again"] if finds else "-",
        reports["midway"]["midway"] if finds else "-",
        ". ".join(beside) or "-",
        ", ".join(left) or "nothing",
    ]


def main() -> None:
    new = {}
    for way in WAYS:
        if not sys.argv[1:] or way.__name__ in sys.argv[1:]:
            try:
                new[way.title] = "| " + " | ".join(row(way)) + " |"
                print(new[way.title], flush=True)
            except (FailedError, KeyError, OSError, subprocess.TimeoutExpired) as error:
                print(f"{way.title} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    page, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, end, rest = rest.partition(END)
    lines = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]} | new
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    rows += [lines[way.title] for way in WAYS if way.title in lines]
    PAGE.write_text(page + begin + "\n".join([*rows, ""]) + end + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
