"""Full means full: a put is refused only where what may go, with the gaps around it, is nowhere long enough."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError

LINE = 64
LINES = 40


@dataclass
class Stored:
    ref: ObjectRef
    lines: int
    view: Any  # None: nobody holds it


def longest_room(stored: list[Stored]) -> int:
    """Lines of the longest stretch without a held object."""
    held = sorted((s.ref.address // LINE, s.lines) for s in stored if s.view is not None)
    best = at = 0
    for start, lines in held:
        best = max(best, start - at)
        at = start + lines
    return max(best, LINES - at)


def fill(lines: int) -> np.ndarray[Any, Any]:
    """An array whose object takes so many lines: the first one is for key and metadata."""
    return np.zeros((lines - 1) * LINE, np.uint8)


def test_a_gap_that_reaches_over_the_hand_is_found_whole() -> None:
    with ObjectStoreWriter.create(capacity=LINES * LINE, n_readers=1) as writer:
        reader = ObjectStoreReader.attach(writer.handle, 0)
        view = reader.get(writer.put("held", fill(4)))
        reader.release(writer.put("gone", fill(20)))
        writer.delete("gone")  # the hand stands behind it, in the middle of the gap
        ref = writer.put("large", fill(LINES - 4))
        assert ref.address == 4 * LINE
        del view
        reader.close()


@pytest.mark.parametrize("eviction", ["clock", "fifo"])
@pytest.mark.parametrize("seed", range(20))
def test_a_put_is_refused_exactly_where_no_stretch_is_long_enough(seed: int, eviction: Any) -> None:
    rng = random.Random(seed)
    outcomes = set()
    with ObjectStoreWriter.create(capacity=LINES * LINE, n_readers=1, eviction=eviction) as writer:
        reader = ObjectStoreReader.attach(writer.handle, 0)
        stored: dict[str, Stored] = {}
        for step in range(300):
            key, lines = f"k{step}", rng.randint(2, 14)
            room = longest_room(list(stored.values()))
            try:
                ref = writer.put(key, fill(lines))
            except StoreFullError:
                assert room < lines
                outcomes.add("refused")
            else:
                assert room >= lines
                outcomes.add("stored")
                view = reader.get(ref)
                stored[key] = Stored(ref, lines, view if rng.random() < 0.6 else None)
                del view
            stored = {k: s for k, s in stored.items() if writer.is_cached(k)}
            writer.check_valid()
            for k in rng.sample(sorted(stored), min(len(stored), rng.randint(0, 2))):
                stored[k].view = None
                if rng.random() < 0.5:
                    writer.delete(k)
                    del stored[k]
                elif rng.random() < 0.5:
                    writer.touch(k)
        assert outcomes == {"refused", "stored"}
        stored.clear()
        reader.close()
