"""One `vllm serve` with several API servers, and with several engines: what its processes have in common."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support import until
from tests.vllm.encoder import counting
from tests.vllm.inputs import photograph
from tests.vllm.server import END, Server, server

IMAGES = 8
SERVERS = ENGINES = 2


class Seen(NamedTuple):
    """What there is to see when each photograph was asked about once at one API server, and then at each of them."""

    tokens: list[list[int]]
    processed: list[int]
    """Images that were processed by the end of each round."""
    keys: list[str | None]
    shown: tuple[float, ...]
    """Puts, hits and misses, as the server that was asked shows them."""
    at_once: int
    """Images that were processed when all API servers got the same new ones at the same moment."""
    failed: int
    """The status of a request that fails in the processor, and leaves no claim."""
    left: list[str]
    """What stayed: its processes and its store."""


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    settings = ("--data-parallel-size", f"{ENGINES}", "--mm-processor-cache-gb", "0.1", "--max-num-seqs", "2")
    tokens: list[list[int]] = []
    processed, folder = [], tmp_path_factory.mktemp("servers")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in counting.environment(folder).items():
            patch.setenv(name, value)
        running = stack.enter_context(server(model, folder / "log", *settings))
        with running.doors(SERVERS) as doors:
            for asked in [doors * (IMAGES // SERVERS), *([door] * IMAGES for door in doors)]:
                for number, door in enumerate(asked):
                    status, choices = running.ask(photograph(number), door=door)
                    assert 200 == status
                    tokens += choices
                processed.append(running.images_processed(len(tokens)))
            one = running.behind(doors[0])
        assert ENGINES == len(running.engines())
        shown = tuple(running.metric(f"shmstore_{name}_total") for name in ("puts", "hits", "misses"))
        keys, store, family = running.keys(), Path("/dev/shm", running.store().name), running.family()
        at_once, failed = meet(running, folder), fail(running)
        psutil.Process(one).kill()  # vLLM ends the others when one has died
        _, alive = psutil.wait_procs(family, END)
    return Seen(
        tokens,
        processed,
        keys,
        shown,
        at_once,
        failed,
        [*map(str, alive), *map(str, [store] * store.exists())],
    )


def meet(running: Server, folder: Path) -> int:
    """Ask all API servers about the same new photographs at once: eight together, and then eight alone."""
    before = counting.processed(folder)
    new = [photograph(number, (480, 360)) for number in range(IMAGES, 3 * IMAGES)]
    with running.doors(SERVERS) as doors:
        for pictures in (new[:IMAGES], *([one] for one in new[IMAGES:])):
            body = running.body(*pictures)
            for door in doors:
                running.post(door, body)
            first, *others = [running.answer(door) for door in doors]
            assert 200 == first[0]
            assert [first] * (SERVERS - 1) == others
    return counting.processed(folder) - before


def fail(running: Server) -> int:
    """Send a picture that is too thin, for which the processor raises an error; no claim of its server stays."""
    status, _ = running.ask(photograph(0, (600, 2)))
    until(lambda: not running.claimed())
    return status


def test_the_tokens_are_those_of_one_server(seen: Seen, lru: dict[str, list[list[int]]]) -> None:
    assert lru["photographs"][:IMAGES] * (1 + SERVERS) == seen.tokens


def test_an_image_is_processed_and_stored_once_whichever_server_is_asked(seen: Seen) -> None:
    assert [IMAGES] * (1 + SERVERS) == seen.processed
    assert IMAGES == len(seen.keys) == len(set(seen.keys))


def test_images_that_all_servers_meet_at_once_are_processed_once(seen: Seen) -> None:
    assert 2 * IMAGES == seen.at_once


def test_a_request_that_fails_in_the_processor_leaves_no_claim(seen: Seen) -> None:
    assert 400 == seen.failed


def test_the_metrics_of_the_store_are_sums_over_all_servers(seen: Seen) -> None:
    assert (IMAGES, IMAGES * SERVERS, IMAGES) == seen.shown


def test_nothing_stays_when_one_of_its_api_servers_is_killed(seen: Seen) -> None:
    assert [] == seen.left
