"""The ring as a line of cells with one mark each, which shows who holds the memory."""

from dataclasses import dataclass

from shmstore.inspect.records import SlotInfo, StoreSnapshot

FREE, LIVE, DELETED, WRITING, UNSOUND = ".", "o", "x", "w", "!"
PINNED_BY_SEVERAL, LEASED_TO_SEVERAL, HELD = "P", "L", "H"

LEGEND = (
    ("0-9", "pinned by that rank"),
    ("P", "pinned by several ranks, or by one above 9"),
    ("a-j", "leased to rank 0-9, unread"),
    ("L", "leased to several ranks, or to one above 9"),
    ("H", "held by a writer"),
    ("w", "being written"),
    ("o", "not held"),
    ("x", "deleted, freed when room is needed"),
    (".", "free"),
    ("v", "the hand, above its cell"),
)


@dataclass(frozen=True, slots=True)
class RingMap:
    """The data regions of all arenas, one after the other, as equal cells."""

    cells: tuple[str, ...]
    """One mark per cell: the mark of the object in it that is hardest to free."""
    cell_bytes: float
    hands: tuple[int, ...]
    """The cells that the hands of the writers are in."""


def mark_of(slot: SlotInfo) -> str:
    """Return the mark of an object, which says who holds it."""
    if not slot.bounded and not slot.moving:
        return UNSOUND
    if slot.pinned_by:
        return str(slot.pinned_by[0]) if len(slot.pinned_by) == 1 and slot.pinned_by[0] < 10 else PINNED_BY_SEVERAL
    if slot.state == "writing":
        return WRITING
    if slot.held:
        return HELD
    if slot.leased_to:
        one = len(slot.leased_to) == 1 and slot.leased_to[0] < 10
        return chr(ord("a") + slot.leased_to[0]) if one else LEASED_TO_SEVERAL
    return DELETED if slot.deleted else LIVE


_RISING = (
    FREE,
    DELETED,
    LIVE,
    "abcdefghij" + LEASED_TO_SEVERAL + HELD,
    WRITING,
    "0123456789" + PINNED_BY_SEVERAL,
    UNSOUND,
)
"""The marks, from what is free to what is hardest to free."""


def _weight(mark: str) -> int:
    return next(weight for weight, marks in enumerate(_RISING) if mark in marks)


def ring_map(snapshot: StoreSnapshot, cells: int) -> RingMap:
    """Return the ring of `snapshot` as at most `cells` cells of at least 64 bytes."""
    capacity = snapshot.facts.capacity
    arena = capacity // len(snapshot.facts.writers)
    count = max(1, min(cells, capacity // 64))
    marks = [FREE] * count
    for slot in snapshot.slots:
        if not slot.span:
            continue
        mark = mark_of(slot)
        weight = _weight(mark)
        start = slot.writer * arena + slot.offset
        first = start * count // capacity
        last = (start + slot.span - 1) * count // capacity
        for cell in range(first, min(last, count - 1) + 1):
            if weight > _weight(marks[cell]):
                marks[cell] = mark
    hands = [(w.index * arena + min(w.hand, arena - 1)) * count // capacity for w in snapshot.facts.writers]
    return RingMap(tuple(marks), capacity / count, tuple(hands))
