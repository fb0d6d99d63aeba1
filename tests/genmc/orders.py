"""Each memory order of the store's code that is stronger than relaxed, and the program that fails without it."""

import re
from typing import NamedTuple

STRONG = r"memory_order_(seq_cst|acq_rel|release|acquire)"


class Order(NamedTuple):
    label: str
    file: str
    text: str
    """Stands once in the file. Its first order that is not relaxed is the one meant."""
    program: str = ""
    """Fails if the order is one step weaker."""
    why: str = ""
    """Without a program: why it stays."""

    @property
    def order(self) -> str:
        found = re.search(STRONG, self.text)
        assert found is not None
        return found[1]

    @property
    def weaker(self) -> str:
        if self.order != "seq_cst":
            return "relaxed"
        if re.search(r"_fetch_|_fence", self.text):
            return "acq_rel"
        return "acquire" if "_load" in self.text else "release"

    def change(self) -> tuple[str, str, str]:
        strong, weak = f"memory_order_{self.order}", f"memory_order_{self.weaker}"
        return self.file, self.text, self.text.replace(strong, weak, 1)


DEATH = (
    "A successor may find what it orders, and the compiler may not move it: GenMC runs stores in the order of the code."
)
PIN = "Whoever sees the acknowledgement sees the pin; without that, the argument would rest on R2a and the fence of W2."
BASE = "Whoever sees a base sees the epoch and the pins of its process, so no look takes two processes for one."
LIST = "Whoever comes to an entry sees the lease that was linked in, or a later one, whether or not it has read B5."
ENTRY = "`what` is at least as new as the number, so a walk sees no lease that never was."
GLANCE = "What is read may be old by then, and the caller looks again or only tells it."
ONCE = "It is outside the protocol, and once in the life of what it orders."

ORDERS: list[Order] = [
    # ---- a rank ----
    Order("A2", "readers.c", "& ~SHMS_PIN_COUNT,\n                                  memory_order_release", "rank_dies"),
    Order("A3", "readers.c", "&t->epoch, epoch + 1, memory_order_seq_cst", "retire"),
    Order("A4 retired", "readers.c", "atomic_load_explicit(&by->retired[rank], memory_order_seq_cst)", "retire"),
    Order("A4 base", "readers.c", "SHMS_FINDS : base, memory_order_release", why=BASE),
    Order("E1", "readers.c", "SHMS_CLOSED, memory_order_release", why=BASE),
    Order(
        "R1", "readers.c", "atomic_fetch_add_explicit(&shms_reader_pins(t)[i], 1, memory_order_seq_cst)", "pin_evict"
    ),
    Order("R2a", "readers.c", "atomic_load_explicit(&slot->state, memory_order_seq_cst)", "pin_evict"),
    Order("R2c", "wait.c", "atomic_load_explicit(&s->state, memory_order_seq_cst)", "keep"),
    Order("R3b", "readers.c", "ack, &seen, number, memory_order_release", why=PIN),
    Order("R4", "readers.c", "&shms_reader_pins(t)[i], 1, memory_order_release", "pin_evict"),
    Order(
        "R4 zone",
        "readers.c",
        "[shms_zone_of(l, offset)], 1,\n                                  memory_order_release",
        "poll_release",
    ),
    Order("R4 total", "readers.c", "&t->releases, 1, memory_order_release", "poll_release"),
    Order("R4 fence", "readers.c", "atomic_thread_fence(memory_order_seq_cst)", "poll_failed"),
    Order("release secret", "reader.c", "&s->secret, memory_order_acquire", "release"),
    Order("validate", "reader.c", "atomic_load_explicit(&s->state, memory_order_acquire)", why=GLANCE),
    Order("data", "reader.c", "arena)->epoch, memory_order_acquire", why=ONCE),
    # ---- a look-up ----
    Order("find id", "find.c", "&s->id, memory_order_acquire", "find"),
    Order("find state", "slots.h", "&s->state, memory_order_acquire", "find"),
    Order("find fence", "find.c", "atomic_thread_fence(memory_order_acquire)", "look"),
    # ---- a put ----
    Order("P1", "pending.c", "n_writers, memory_order_release", why=DEATH),
    Order("P2", "pending.c", "SHMS_WRITING, memory_order_release", why=DEATH),
    Order("P2 fence", "pending.c", "atomic_thread_fence(memory_order_release)", "find"),
    Order("P2 secret", "pending.c", "secret, memory_order_release", "release"),
    Order("P4", "pending.c", "SHMS_LIVE, memory_order_release", "next_object"),
    Order("P5", "hand.c", "SHMS_FREE, memory_order_release", why=DEATH),
    # ---- leases ----
    Order("L1", "leases.c", "next_lease, number + 1, memory_order_release", why=DEATH),
    Order(
        "L1 fence",
        "leases.c",
        "atomic_thread_fence(memory_order_release)",
        why="It pairs with the second read of an inspector, which is no process of the protocol.",
    ),
    Order("L2", "leases.c", "&e->number, number, memory_order_release", why=ENTRY),
    Order("L3", "leases.c", "published, number + 1, memory_order_release", why=DEATH),
    Order("C2", "leases.c", "shms_lease_with_next(shms_get(what), next + 1), memory_order_release", why=LIST),
    Order("V4", "leases.c", "shms_get(&l->writer->next_lease), memory_order_release", why=DEATH),
    Order("find_ref", "handouts.c", "&s->secret, memory_order_acquire", why=GLANCE),
    # ---- an eviction ----
    Order("W1a ack", "readers.h", "[entry], memory_order_acquire", why=PIN),
    Order("W1a base", "readers.h", "&t->base[writer], memory_order_acquire", why=BASE),
    Order(
        "W1b",
        "holders.c",
        "peer)->epoch, memory_order_acquire",
        why="The probe of W1c is a system call, which nothing here orders.",
    ),
    Order("W2", "reclaim.c", "SHMS_EVICTING, memory_order_release", "find_stays"),
    Order("W2 fence", "reclaim.c", "atomic_thread_fence(memory_order_seq_cst)", "pin_evict"),
    Order("W3", "holders.c", "&pins[slots[i]], memory_order_acquire", "pin_evict"),
    Order("W3h", "holders.c", "->pinning, memory_order_acquire", "remote"),
    Order("W3f", "holders.c", "[of_all].first, memory_order_acquire", why=LIST),
    Order("W3n", "holders.c", "&e->number, memory_order_acquire", why=ENTRY),
    Order("D1", "reclaim.c", "SHMS_SLOT_DELETED, memory_order_release", why=DEATH),
    Order("T1", "handouts.c", "seen + 1, memory_order_seq_cst", "retire"),
    Order("T2", "handouts.c", "while (atomic_load_explicit(epoch, memory_order_seq_cst)", "retire"),
    Order("T2 count", "handouts.c", "shms_get(retirements) + 1, memory_order_release", "poll_retire"),
    # ---- another writer ----
    Order("B1", "remote.c", "slot + 1, memory_order_seq_cst", "remote"),
    Order("B2a", "remote.c", "atomic_load_explicit(&s->state, memory_order_seq_cst)", "remote"),
    Order("B4", "leases.c", "entry + 1, memory_order_release", why=LIST),
    Order("B4 kept", "remote.c", "entry + 1, memory_order_release", why=LIST),
    Order(
        "B5",
        "remote.c",
        "pinning, 0, memory_order_release",
        "remote",
    ),
    Order("C2 fence", "leases.c", "atomic_thread_fence(memory_order_seq_cst)", "poll_complete"),
    Order("B5 zone", "leases.c", "shms_get(zone) + 1, memory_order_release", "poll_group"),
    Order("B5 total", "leases.c", "shms_get(total) + 1, memory_order_release", "poll_cancel"),
    Order("D2 cell", "drops.c", "slot, memory_order_release", "drop_many"),
    Order("D2", "drops.c", "drops + 1, memory_order_release", "drop"),
    Order("D2 again", "remote.c", "shms_get(&seg->writer->drops) + 1, memory_order_release", why=DEATH),
    Order("D3", "drops.c", "&t->drops, memory_order_acquire", "drop"),
    Order("D3 fence", "drops.c", "atomic_thread_fence(memory_order_acquire)", "drop_many"),
    # ---- what a search remembers ----
    Order(
        "poll total",
        "holders.c",
        "now.releases = atomic_load_explicit(&t->releases, memory_order_acquire);\n        any |= poll(w, r,",
        "poll_release",
    ),
    Order(
        "poll writer's total",
        "holders.c",
        "now.releases = atomic_load_explicit(&t->releases, memory_order_acquire);\n        const",
        "poll_cancel",
    ),
    Order("poll fence", "holders.c", "    atomic_thread_fence(memory_order_seq_cst);\n    w->released", "poll_failed"),
    Order("yield fence", "holders.c", "atomic_thread_fence(memory_order_seq_cst); /* as in", "poll_yield"),
    Order("awaited", "holders.c", "->epoch, memory_order_acquire) == 0", why=GLANCE),
    # ---- a successor ----
    Order("V1", "writer.c", "SHMS_FREE, memory_order_release", why=DEATH),
    Order("V2", "writer.c", "SHMS_LIVE, memory_order_release", why="Who finds the object has its bytes by it."),
    Order(
        "its epoch",
        "writer.c",
        "&t->epoch, shms_get(&t->epoch) + 1, memory_order_release",
        why="A poll that sees it sees J1, J2 and V3; only a function that opens a file stores it.",
    ),
    # ---- outside the protocol ----
    Order("stamp", "create.c", "shms_layout_stamp(), memory_order_release", why=ONCE),
    Order("kind", "writer.c", "words[0], memory_order_release", why=ONCE),
    Order("kind read", "slots.h", "&kind->name[0], memory_order_acquire", why=ONCE),
    Order("clear tier", "writer.c", "atomic_thread_fence(memory_order_seq_cst); /* a writer", why=ONCE),
    Order("tier cleared", "writer.c", "atomic_thread_fence(memory_order_seq_cst); /* pairs", why=ONCE),
]
