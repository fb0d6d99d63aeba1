"""The estimate of what a larger store would have hit, against a replay of the same requests in a larger store."""

import itertools

import numpy as np
import pytest

from shmstore import StoreStats
from shmstore.store.stats import MORE_HITS
from tests.support import Stores, raises, span_of

DATA = np.zeros(50 << 10, np.uint8)


def requests(zipf: float, n_keys: int, n: int, scan: float) -> list[int]:
    """Return keys by Zipf's law; a part `scan` of them comes once."""
    choose = np.random.default_rng(7)
    weights = 1 / np.arange(1, n_keys + 1) ** zipf
    keys = choose.permutation(n_keys)[choose.choice(n_keys, n, p=weights / weights.sum())]
    fresh = itertools.count(n_keys)
    return [next(fresh) if once else int(key) for key, once in zip(keys, choose.random(n) < scan, strict=True)]


def sizes(n_keys: int, mixed: bool) -> list[int]:
    spread = np.exp(np.random.default_rng(8).uniform(0, np.log(50 if mixed else 1), n_keys))
    return [int(1024 * size) for size in spread]


def replay(stores: Stores, capacity: int, slots: int, keys: list[int], nbytes: list[int]) -> StoreStats:
    writer = stores.create(capacity, n_readers=1, max_objects=slots)
    writer.retire(0)
    for number in keys:
        key = str(number)
        if key in writer:
            writer.get_cached(key)
        else:
            writer.put(key, DATA[: nbytes[number]])
    stats = writer.stats()
    writer.close()
    return stats


@pytest.mark.parametrize(
    ("slots", "within"),
    [
        (4000, 0.01),
        (8000, 0.08),  # one key in 16, by a random hash: some 60 of the objects that fit, so 0.02 is usual
    ],
)
@pytest.mark.parametrize(
    ("zipf", "working_set", "scan", "mixed"),
    [
        (0.7, 2, 0.0, False),
        (0.9, 4, 0.2, True),
    ],
)
def test_the_estimate_is_within_a_hundredth_of_a_replay_and_that_of_a_sample_near(
    stores: Stores, zipf: float, working_set: int, scan: float, mixed: bool, slots: int, within: float
) -> None:
    n = 1000
    keys = requests(zipf, n * working_set, 20 * n, scan)
    nbytes = sizes(max(keys) + 1, mixed)
    capacity = sum(span_of("1", DATA[:size]) for size in nbytes[: n * working_set]) // working_set
    found = replay(stores, capacity, slots, keys, nbytes)
    for factor in MORE_HITS:
        replayed = replay(stores, int(capacity * factor), int(slots * factor), keys, nbytes)
        assert abs(found.hit_ratio_at(factor) - replayed.hit_ratio) <= within, f"{factor} times the capacity"


def test_the_ratio_at_a_factor_is_of_hits_and_puts(stores: Stores) -> None:
    writer = stores.create(2048, n_readers=1)
    writer.retire(0)
    assert 0.0 == writer.stats().hit_ratio_at(2)
    for key in ("a", "b", "a", "a"):
        if key in writer:
            writer.get_cached(key)
        else:
            writer.put(key, DATA[:1024])
    stats = writer.stats()
    assert (0.25, 0.5, 0.5) == (stats.hit_ratio, stats.hit_ratio_at(2), stats.hit_ratio_at(4))
    with raises(ValueError, names=["factor", "3"]):
        stats.hit_ratio_at(3)
