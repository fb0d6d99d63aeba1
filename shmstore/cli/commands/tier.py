"""`shmstore tier`: whether a tier works, and how fast it is from here."""

import argparse
import math
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from shutil import disk_usage
from statistics import median
from typing import Any

import numpy as np

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, EXIT_WRONG, Command, positive_argument
from shmstore.cli.commands.common import (
    NO_TIER,
    TIER_VARIABLE,
    add_dir,
    add_json,
    complain,
    print_json,
    size,
    size_argument,
    tier_url,
)
from shmstore.cli.commands.tables import make_console, make_table
from shmstore.errors import StoreSpaceError, TierError
from shmstore.places import folder_of
from shmstore.tiers import Tier
from shmstore.tiers.urls import open_tier, shown_url

_SIZES = "1K,1M,6M,64M"
_COUNT = 20
_META = 300
"""Bytes of the first span, as the metadata of an object are."""
_CONNECTS_IN = 5.0
"""A back end may need some seconds until its server is connected."""
_OTHERS = "look for another program or a proxy that changes keys which start with shmstore-check"


def _times(taken: list[float]) -> dict[str, float]:
    """Return the figures of times in seconds, in microseconds."""
    p99 = sorted(taken)[math.ceil(0.99 * len(taken)) - 1]
    return {"median_us": median(taken) * 1e6, "p99_us": p99 * 1e6}


@dataclass(frozen=True, slots=True)
class Figure:
    """What values of one size take."""

    nbytes: int
    publish: dict[str, float]
    fetch: dict[str, float]
    has: dict[str, float]


def check(tier: Tier, sizes: list[int], count: int, dir: str | None = None) -> Iterator[Figure]:
    """Put, fetch and compare `count` values of each size, from and into shared memory; remove what was put.

    Raises TierError if the tier fails or gives anything else than what was put.
    """
    largest = max(sizes) + _META + count  # each value starts one byte later, so that no two are equal
    folder = folder_of(dir)
    with tempfile.TemporaryFile(dir=folder, prefix="shmstore-check-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 2 * largest)
        except OSError as error:
            hint = "values go from and into shared memory: free some, or pass smaller --sizes"
            raise StoreSpaceError(needed=2 * largest, free=disk_usage(folder).free, folder=folder, hint=hint) from error
        mapping = mmap.mmap(file.fileno(), 2 * largest)
        shared = np.frombuffer(mapping, np.uint8)
        source, target = shared[:largest], shared[largest:]
        source[:] = np.frombuffer(np.random.default_rng().bytes(largest), np.uint8)
        register: Callable[..., Any] | None = getattr(tier, "register", None)
        if register is not None:
            register(memoryview(mapping), f"/proc/self/fd/{file.fileno()}")
        _connect(tier)
        for nbytes in sizes:
            yield _check_size(tier, source, target, nbytes, count)


def _connect(tier: Tier) -> None:
    end = time.monotonic() + _CONNECTS_IN
    while True:
        try:
            tier.has(["shmstore-check"])
            return
        except TierError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _check_size(tier: Tier, source: Any, target: Any, nbytes: int, count: int) -> Figure:
    taken: dict[str, list[float]] = {"publish": [], "fetch": [], "has": []}

    def timed(call: str, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = getattr(tier, call)(*arguments)
        taken[call].append(time.perf_counter() - start)
        return result

    for n in range(count):
        key = f"shmstore-check-{secrets.token_hex(8)}"
        value = source[n : n + _META + nbytes]
        meta, payload = memoryview(value[:_META]), memoryview(value[_META:])
        places = iter((memoryview(target[:_META]), memoryview(target[_META : _META + nbytes])))
        try:
            timed("publish", key, [meta, payload])
            there = timed("has", [key]) == [True] and timed("fetch", key, lambda size, places=places: next(places))
        finally:
            with suppress(TierError):  # of a server that has failed, so it says why
                tier.remove([key])
        if not there:
            hint = f"its server may be too small for its load; or {_OTHERS}"
            raise TierError(f"a value of {size(nbytes)} was missing right after it was put", hint=hint)
        if not np.array_equal(value, target[: _META + nbytes]):
            raise TierError(f"a value of {size(nbytes)} came back with other bytes", hint=_OTHERS)
    return Figure(nbytes, *(_times(taken[call]) for call in ("publish", "fetch", "has")))


def _sizes_argument(text: str) -> list[int]:
    return [size_argument(one) for one in text.split(",")]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "put, fetch, compare and time values on a server of yours; exit status 1: something is wrong"
    action = actions.add_parser("check", help=summary, description=summary)
    action.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help=f"such as redis://host:6379, mooncake://host:50051 or file:///dir (default: {TIER_VARIABLE})",
    )
    action.add_argument(
        "--sizes", type=_sizes_argument, default=_SIZES, help="sizes of the values (default: %(default)s)"
    )
    action.add_argument(
        "--count", type=positive_argument, default=_COUNT, help="values of each size (default: %(default)s)"
    )
    add_dir(action)
    add_json(action)


def _run(arguments: argparse.Namespace) -> int:
    figures: list[Figure] = []
    problem: str | None = None
    url = tier_url(arguments.url)
    if url is None:
        return complain("tier", NO_TIER, EXIT_USAGE)
    try:
        tier = open_tier(url)
    except ValueError as error:
        return complain("tier", error, EXIT_USAGE)
    try:
        with closing(tier):
            for figure in check(tier, arguments.sizes, arguments.count, arguments.dir):
                figures.append(figure)  # those before a problem are shown, too
    except TierError as error:
        if error.hint == TierError.default_hint:  # it says to run this command
            error.hint = (
                "look whether its server runs, and at the scheme (rediss:// for TLS), host, port or path, password and "
                "timeout=SECONDS of the URL"
            )
        problem = str(error)
    url = shown_url(url)
    if arguments.json:
        print_json({"ok": problem is None, "url": url, "count": arguments.count, "figures": figures, "error": problem})
    elif figures:
        _print_table(figures)
        print(
            f"{url}: {arguments.count} values of each size, from and into shared memory; MB/s are those of the median"
        )
    return EXIT_OK if problem is None else complain("tier", problem, EXIT_WRONG)


def _print_table(figures: list[Figure]) -> None:
    console = make_console()
    columns = [f"{call} {what}" for call in ("publish", "fetch") for what in ("median", "p99", "MB/s")]
    table = make_table(console, "", "value", *columns, "has median", "has p99")
    for figure in figures:
        row = [size(figure.nbytes)]
        for times in (figure.publish, figure.fetch):
            row += [_ms(times["median_us"]), _ms(times["p99_us"]), f"{figure.nbytes / times['median_us']:.0f}"]
        table.add_row(*row, _ms(figure.has["median_us"]), _ms(figure.has["p99_us"]))
    console.print(table)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"


COMMAND = Command(
    name="tier",
    summary="check a tier: put, fetch, compare and time values on a server of yours",
    example="shmstore tier check redis://host:6379",
    add_arguments=_add_arguments,
    run=_run,
)
