"""Each item is made once: who begins it claims it, and others wait until it is stored, or its maker fails or dies."""

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shmstore import CacheMissError
from shmstore.multimodal import ShmObjectStoreSenderCache as Sender
from shmstore.multimodal.caches import shm_sender as module
from shmstore.multimodal.caches.base import Begun
from shmstore.multimodal.values.types import MULTIMODAL
from shmstore.store import claims
from shmstore.store.arguments import MAX_KEY
from tests.multimodal.helpers import MIB, item, shm_sender, update
from tests.multimodal.test_several_servers import Server, _named_stores_go, settings_of, two  # noqa: F401 a fixture

HOURS = 7200.0


@pytest.fixture
def pair() -> Iterator[tuple[Sender, Sender]]:
    with two() as both:
        yield both


def given(mm_hash: str = "a", nbytes: int = 100) -> Any:
    return item(nbytes), [update(mm_hash)]


class Beginning:
    """A thread that begins; it is made when that thread waits, or is done."""

    def __init__(self, sender: Sender, mm_hashes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        slept = threading.Event()
        self._thread = threading.Thread(target=self._begin, args=(sender, mm_hashes))

        def sleep(seconds: float) -> None:
            slept.set()
            time.sleep(seconds)

        with monkeypatch.context() as during:
            during.setattr(claims, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
            self._thread.start()
            while self._thread.is_alive() and not slept.wait(0.01):
                pass
        self.waits = slept.is_set()

    def _begin(self, sender: Sender, mm_hashes: list[str]) -> None:
        self._begun = sender.begin(mm_hashes, wait=HOURS)

    def answers(self) -> Begun:
        self._thread.join(60)
        return self._begun


def test_two_servers_that_meet_the_same_items_at_once_make_each_once() -> None:
    rng, settings = random.Random(3), settings_of(2)
    with ExitStack() as stack:
        servers = [Server(settings, stack) for _ in range(2)]
        for one in servers:
            one.attached()
        for turn in range(15):
            images = [f"{8 * turn + n}:100" for n in range(8)]
            for one in servers:
                one.pipe.send(("meet", rng.sample(images, 8)))
            answers = Counter(answer for one in servers for answer in one.pipe.recv())
            assert {True: 8, False: 8} == answers
        stats = [one("stats") for one in servers]
        assert (120, 120) == (sum(one.puts for one in stats), sum(one.hits for one in stats))


def test_who_waits_makes_it_when_its_maker_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(2)
    with ExitStack() as stack:
        maker = Server(settings, stack).attached()
        sender = stack.enter_context(shm_sender(settings))
        assert [False, False] == maker("begin", ["1:100", "2:100"])
        start = time.monotonic()
        assert [None] == sender.begin(["1:100"], wait=0.05)
        assert 0.05 <= time.monotonic() - start < 30
        waiter = Beginning(sender, ["2:100", "1:100"], monkeypatch)
        assert waiter.waits
        maker.kill()
        assert [False, False] == waiter.answers()


def test_who_waits_has_the_item_when_it_is_stored_and_holds_no_claim_before(
    pair: tuple[Sender, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    b = "b" * 2 * MAX_KEY  # which the store keeps as its hash
    begun = one.begin([b])
    assert [False] == begun
    waiter = Beginning(other, ["c", b, "a", b], monkeypatch)
    assert waiter.waits
    assert not one.writer.claimed("a")
    one.get_and_update_item(given("b"), b)
    assert [False, True, False, True] == waiter.answers()
    assert [True, False] == [one.writer.claimed("a"), one.writer.claimed(b)]
    assert [update("b")] == other.get_and_update_item(None, b)[1]
    assert (1, 0) == (other.writer.stats().hits, other.writer.stats().misses)


def test_two_that_claim_at_the_same_moment_do_so_in_one_order(
    pair: tuple[Sender, Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    for sender in pair:
        monkeypatch.setattr(sender.writer, "claimed", lambda key: False)  # as it was a moment ago
    take, waiters = one._inside.look_or_claim, list[Beginning]()

    def then_the_other(*arguments: Any) -> Any:
        found = take(*arguments)
        if not waiters:
            waiters.append(Beginning(other, ["a", "b"], monkeypatch))
        return found

    one._inside = one._inside._replace(look_or_claim=then_the_other)
    begun = one.begin(["b", "a"])
    assert ([False, False], True) == (begun, waiters[0].waits)
    one.get_and_update([given("a"), given("b")], ["a", "b"])
    assert [True, True] == waiters[0].answers()


def test_it_waits_so_long_for_all_together(pair: tuple[Sender, Sender], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    begun, slept = one.begin(["a", "b", "c"]), list[float]()
    assert [False] * 3 == begun
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    for one_that_waits in (claims, module):
        monkeypatch.setattr(one_that_waits, "time", clock)
    assert [None] * 3 == other.begin(["a", "b", "c"])
    assert 1.0 == pytest.approx(sum(slept)), "the default"


def stores(sender: Sender, begun: Begun) -> None:
    sender.get_and_update_item(given(), "a")


def stores_in_a_batch(sender: Sender, begun: Begun) -> None:
    sender.get_and_update([given("z"), given()], ["z", "a"])


def sends_inline(sender: Sender, begun: Begun) -> None:
    piece, _ = sender.get_and_update_item(given(nbytes=8 * MIB), "a")
    assert piece == item(8 * MIB)


def fails_to_store(sender: Sender, begun: Begun) -> None:
    with pytest.raises(CacheMissError):
        sender.get_and_update([given(), None], ["a", "z"])


def leaves_the_block(sender: Sender, begun: Begun) -> None:
    with suppress(ZeroDivisionError), begun as same:
        assert same is begun
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "finish",
    [stores, stores_in_a_batch, sends_inline, fails_to_store, leaves_the_block],
    ids=lambda f: f.__name__,
)
def test_a_claim_ends_with_what_was_begun(finish: Callable[[Sender, Begun], None], pair: tuple[Sender, Sender]) -> None:
    one, other = pair
    begun = one.begin(["a", "b"])
    assert [True, True] == [other.writer.claimed(key) for key in "ab"]
    finish(one, begun)
    assert [False, finish is not leaves_the_block] == [other.writer.claimed(key) for key in "ab"]
    del begun
    assert not other.writer.claimed("b")


def test_the_claims_of_a_processor_that_fails_end_with_its_frames(pair: tuple[Sender, Sender]) -> None:
    one, other = pair

    def process(pixels: list[int]) -> Any:
        begun = one.begin(["a", "x" * 2 * MAX_KEY])
        return begun, pixels[0]

    with pytest.raises(IndexError) as caught:
        process([])
    assert other.writer.claimed("a")
    del caught
    gc.collect()
    assert not other.writer.claimed("a")
    assert [False, False] == other.begin(["x" * 2 * MAX_KEY, "a"], wait=0)


def test_what_is_stored_without_its_updates_is_made_by_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, types = settings_of(2), replace(MULTIMODAL, encode_updates=lambda updates: None)
    with shm_sender(settings, types) as one, shm_sender(settings, types) as other:
        begun = one.begin(["a"])
        assert [False] == begun
        waiter = Beginning(other, ["a"], monkeypatch)
        assert waiter.waits
        one.get_and_update_item(given(), "a")
        assert [False] == waiter.answers()
        other.get_and_update_item(given(), "a")
        assert [[True], [True]] == [one.begin(["a"]), other.begin(["a"])]
        assert not one.writer.claimed("a")
