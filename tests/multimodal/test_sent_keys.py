"""When P1 rejects a request, P0 takes back the keys sent since then, and does not visit the others."""

import random
from collections import OrderedDict
from collections.abc import Iterator

from shmstore.multimodal.caches.shadow import Offer, SentKeys


def send(sent: SentKeys[str, str | None], *keys: str, size: int = 1) -> list[str | None]:
    return sent.send(keys, keys, lambda *_: None, lambda key, _: Offer(size, key, 1, key), lambda kept: None)


def expected(sent: SentKeys[str, str | None], lost: list[str]) -> set[str]:
    """Return the expected keys by visiting every entry, as the docstring of `shadow` says."""
    since = sent._counts.total
    for key in lost:
        entry = sent._shadow.entries.get(key)
        first_hit = sent._departed.get(key) if entry is None else entry[0].first_hit
        since = min(since, since if first_hit is None else first_hit)
    back = {key for key, entry in sent._shadow.entries.items() if entry[0].sent_at >= since}
    return {key for key in sent._kept.entries if key not in back and key not in lost}


def test_what_is_taken_back_is_what_a_look_at_each_entry_finds() -> None:
    chance = random.Random(7)
    took = 0
    for _ in range(60):
        sent: SentKeys[str, str | None] = SentKeys(chance.choice([8, 30]), chance.choice([5, 30]))
        for _ in range(60):
            keys = [f"{chance.randrange(20)}" for _ in range(chance.randrange(1, 5))]
            send(sent, *keys, size=chance.choice([1, 2, 9]))
            sent.touch(f"{chance.randrange(20)}")
            assert set(sent._kept.entries) <= set(sent.order) == set(sent._sendings)
            if chance.random() < 0.3:
                lost = [f"{chance.randrange(20)}" for _ in range(chance.randrange(3))]
                left, before = expected(sent, lost), len(sent._kept.entries)
                sent.invalidate(lost)
                assert left == set(sent._kept.entries)
                took += before - len(left) > len(lost)
    assert took > 50


class Watched(OrderedDict[str, None]):
    """Records which keys are visited, from the last one back."""

    def __reversed__(self) -> Iterator[str]:
        self.looked: list[str] = []
        for key in super().__reversed__():
            self.looked.append(key)
            yield key


def test_taking_back_looks_at_what_it_takes_back_alone() -> None:
    sent: SentKeys[str, str | None] = SentKeys(10_000_000, 10_000_000)
    for n in range(5000):
        send(sent, f"{n}")
    send(sent, "7", "new")
    send(sent, "newer")
    sendings = sent._sendings = Watched(sent._sendings)
    sent.invalidate(["7"])
    assert ["newer", "new", "4999"] == sendings.looked
    assert [False, False, False, True] == [sent.peek(key) is not None for key in ("7", "new", "newer", "4999")]
