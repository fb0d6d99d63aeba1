"""``python -m bench.peers``: measure, and write the page and its plots."""

import argparse
from pathlib import Path

from bench.peers import LIMITS, PEERS
from bench.peers.harness import READERS, SIZES, Results, run
from bench.peers.plots import draw
from bench.peers.report import write
from shmstore.cli.commands.common import size_argument

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the session that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    sizes = ",".join(map(str, SIZES))
    parser.add_argument(
        "--sizes",
        type=lambda text: [size_argument(one) for one in text.split(",")],
        default=sizes,
        help="such as 1K,6M",
    )
    parser.add_argument("--readers", default=",".join(map(str, READERS)))
    parser.add_argument("--budget", type=float, default=0.4, help="seconds of exchanges for each figure")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "peers.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "contributing" / "benchmarks.md")
    parser.add_argument("--only-write", action="store_true", help="write the page of results that are there")
    parser.add_argument("--only-draw", action="store_true", help="draw the plots of the figures on the page")
    arguments = parser.parse_args()
    if arguments.only_draw:
        return draw(arguments.page)
    if not arguments.only_write:
        names = arguments.peers.split(",")
        unknown = set(names) - set(PEERS)
        if unknown:
            parser.error(f"no such peers: {', '.join(sorted(unknown))}")
        readers = [int(count) for count in arguments.readers.split(",")]
        if min(arguments.sizes) < 512 or not names or set(names) <= set(LIMITS):
            parser.error("sizes are at least 512 bytes, and there is at least one peer besides the limits")
        run(names, arguments.sizes, readers, arguments.budget).save(arguments.results)
    write(Results.load(arguments.results), arguments.page)


if __name__ == "__main__":
    main()
