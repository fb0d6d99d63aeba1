"""Measure what a full store costs: refusals, long searches, large evictions, and a concurrent hit or get.

The program `edges.c` does the work. With Python threads, the interpreter's lock would be measured instead.
``EDGES_BASE=../other-checkout make bench`` also runs the program with the ``csrc`` of another version, in turn.
"""

from collections.abc import Callable

import pytest

from bench import edges as program

Edges = Callable[[str, str], tuple[list[float], list[float] | None]]


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Edges:
    """Return a function that gives the values of a figure, and those of the other version if there is one."""
    compiled = program.programs(tmp_path_factory.mktemp("edges"))
    measured: dict[str, dict[str, program.Values]] = {}

    def values(group: str, name: str) -> tuple[list[float], list[float] | None]:
        if group not in measured:
            measured[group] = program.measure(compiled, group)
        return measured[group]["new"][name], measured[group]["old"][name] if "old" in compiled else None

    return values


@pytest.mark.parametrize(
    ("name", "group", "what", "limit"),
    [
        ("refused-1-rank", "refused", "put refused after a get elsewhere, 100000 held, 1 rank", 50),
        ("refused-8-ranks", "refused", "put refused after a get elsewhere, 100000 held, 8 ranks", 50),
        ("split-100k", "split", "put refused, every second of 100000 may go", 50),
        ("split-500k", "split", "put refused, every second of 500000 may go", 1000),
        ("no-lease-entry", "lease", "hit without a lease entry, 262144 taken, after a get elsewhere", 3000),
        ("during-metadata-has", "metadata", "is_cached during a put of 200 MiB of metadata, longest", 1000),
    ],
)
def test_what_a_full_store_costs(figure, edges, name, group, what, limit):
    new, old = edges(group, name)
    figure.measured(what, new[0], limit=limit, reference=old and old[0])


@pytest.mark.parametrize("name", ["past-100k", "past-500k"])
def test_a_put_that_must_search_far(figure, edges, name):
    new, old = edges("past", name)
    what = f"put of 12 MiB past {name[5:]} small held ones, beyond the copy"
    figure.measured(what, new[0] - new[1], limit=200, reference=old and old[0] - old[1])


@pytest.mark.parametrize(
    ("column", "what", "limit"), [(0, "median", 2), (1, "99th percentile", 20), (2, "longest", 1000)]
)
@pytest.mark.parametrize("during", ["refused", "victims"])
@pytest.mark.parametrize("operation", ["hit", "get"])
def test_during_other_puts(figure, edges, operation, during, column, what, limit):
    new, old = edges("during", f"during-{during}-{operation}")
    puts = {"refused": "refused puts", "victims": "a put with 32768 victims"}[during]
    figure.measured(f"{operation} during {puts}, {what}", new[column], limit=limit, reference=old and old[column])


@pytest.mark.parametrize("name", ["capacity-1-gib", "capacity-4-gib"])
def test_effective_capacity(figure, edges, name):
    new, _ = edges("capacity", name)
    figure.value(f"bytes not filled, per 1000, 1 to 32 MiB, a tenth held, {name[9]} GiB", 1000 * (1 - new[0]), limit=30)
