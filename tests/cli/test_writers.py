"""What the commands show of a store of several writers, of which one has died."""

import os
import re
import signal
from pathlib import Path

import pytest

from shmstore import ObjectStoreWriter
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.ring import LEGEND, ring_map
from tests.inspect.cases import OPTIONS, piped, running, three_writers
from tests.support import SHM, store_name

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "operators.md"
pytestmark = pytest.mark.alone


def table(out: str, title: str) -> list[dict[str, str]]:
    """Return the rows of a printed table, in which no cell is empty; a unit is part of its number."""
    lines = out.split(f"\n{title}")[1].split("\n\n")[0].splitlines()[1:]
    head, *rows = (re.sub(r"(?<=\d) (?=%|[KMG]?i?B\b)|(?<=hit) ", "", line).split() for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_dump_has_a_line_for_each_writer_and_says_whose_objects_a_writer_leases() -> None:
    with three_writers() as (writer, (alive, dead)):
        dead.kill()
        writer.get_cached("own-2")
        out = piped("dump", writer.name).out
        one = piped("dump", writer.name, "--key", "own-2").out
    assert "writers 2 of 3 alive" in out
    assert "6 hits (5 remote)" in out
    rows = table(out, "writers ")
    assert [str(os.getpid()), str(alive.pid), str(dead.pid)] == [row["process"] for row in rows]
    assert ["alive", "alive", "dead"] == [row["state"] for row in rows]
    assert ["1", "2", "2"] == [row["remote"] for row in rows]
    lines = [line.split() for line in out.splitlines() if " live " in line]
    place = {line[-1]: (line[0], line[line.index("live") - 1]) for line in lines}
    assert [("0", "1"), ("0", "-"), ("2", "0")] == [place[key] for key in ("key-1", "key-3", "own-2")]
    leases = [line for line in out.splitlines() if ", of writer" in line]
    assert [(1, 0), (1, 0), (0, 2)] == [(int(line.split()[0]), int(line.split()[-1])) for line in leases]
    assert "2,3 of group 1, of writer 0" in leases[0]
    assert "the writer, of writer 0" in leases[1]
    assert "writer 2, slot 32, offset 0" in one


def test_dump_shows_the_leases_of_a_dead_writer_among_all() -> None:
    with three_writers() as (writer, (_, dead)):
        dead.kill()
        brief, everything = (piped("dump", writer.name, *more).out for more in ((), ("--all",)))
    assert 0 == brief.count("its writer has ended")
    assert 2 == everything.count("nobody (its writer has ended), of writer 0")


def test_the_ring_shows_the_arenas_one_after_the_other() -> None:
    with three_writers() as (writer, _), StoreInspector.open(writer.name) as inspector:
        snapshot = inspector.snapshot()
    ring = ring_map(snapshot, 3 * 64)
    assert [True, True, True] == [ring.cells[64 * arena] != "." for arena in range(3)]
    assert {"."} == set(ring.cells[16:64]) | set(ring.cells[66:128]) | set(ring.cells[130:])
    assert [0, 1, 2] == [hand // 64 for hand in ring.hands]


def _two_writers(name: str, ready: int) -> None:
    first = ObjectStoreWriter.create(name, **OPTIONS, n_writers=3)
    second = ObjectStoreWriter.join(name)
    os.write(ready, b"r")
    signal.pause()
    del first, second


def test_ls_and_top_say_how_many_writers_are_alive() -> None:
    with three_writers() as (writer, (_, dead)):
        dead.kill()
        listed = next(row for row in piped("ls").out.splitlines() if writer.name in row)
        entry = next(e for e in piped("ls", "--json").json["segments"] if e["name"] == writer.name)
        rows = piped("top", "--iterations", "1").out.splitlines()
        screen = piped("top", writer.name, "--iterations", "1").out
    assert "2 of 3 alive" in listed
    assert (3, 2, 3 << 16) == (entry["writers"], entry["writers_alive"], entry["facts"]["capacity"])
    assert "2 of 3 alive" in next(row for row in rows if writer.name in row)
    assert "writers 2 of 3 alive" in screen
    assert ["alive", "alive", "dead"] == [row["state"] for row in table(screen, "writers ")]


def test_writers_that_have_all_closed_are_told_from_those_that_died() -> None:
    name = store_name()
    with running(name, _two_writers) as child:  # nobody ever has the third arena
        child.kill()
        died = [piped(command, name).out for command in ("ls", "gc", "dump")]
        ObjectStoreWriter.join(name, 0).close(unlink=False)
        half = piped("ls", name).out
        ObjectStoreWriter.join(name, 1).close(unlink=False)
        closed = [piped(command, name).out for command in ("ls", "gc", "dump")]
    assert [True] * 4 == ["0 of 3 alive" in out for out in (*died, half)]
    assert [True] * 3 == [re.search(r"\bclosed\b", out) is not None and "0 of 3" not in out for out in closed]


def test_a_quick_look_says_how_many_writers_are_alive() -> None:
    with three_writers() as (writer, (one, two)):
        for alive, ended in ((3, None), (2, two), (1, one)):
            if ended is not None:
                ended.kill()
            ran, as_json = piped("verify", writer.name, "--quick"), piped("verify", writer.name, "--quick", "--json")
            assert (0, 0) == (ran.status, as_json.status)
            assert f"{alive} of 3 writers are alive" in ran.out
            assert (3, alive) == (as_json.json["file"]["writers"], as_json.json["file"]["writers_alive"])
        writer.close(unlink=False)
        ran, as_json = piped("verify", writer.name, "--quick"), piped("verify", writer.name, "--quick", "--json")
        assert (1, 1) == (ran.status, as_json.status)
        assert "0 of 3 writers are alive" in ran.err
        assert (3, 0) == (as_json.json["file"]["writers"], as_json.json["file"]["writers_alive"])
        (SHM / writer.name).unlink()


def test_a_living_owner_without_a_writer_is_called_that() -> None:
    with ObjectStoreWriter.create(store_name(), **OPTIONS, n_writers=2, writes=False) as owner:
        quick, gc = piped("verify", owner.name, "--quick"), piped("gc", owner.name)
        assert (1, 1) == (quick.status, gc.status)
        assert ("0 of 2 writers are alive" in quick.err, "join(NAME)" in quick.err, "open" in quick.err) == (
            True,
            True,
            False,
        )
        assert "its owner is alive" in gc.err
        writer = ObjectStoreWriter.join(owner.handle)
        assert 0 == piped("verify", owner.name, "--quick").status
        assert "its writer is alive" in piped("gc", owner.name).err
        writer.close()


def test_the_guide_explains_every_mark_of_the_ring() -> None:
    table_of_marks = GUIDE.read_text(encoding="utf-8").split("| mark |")[1].split("\n\n")[0]
    explained = {mark for row in table_of_marks.splitlines()[2:] for mark in re.findall("`(.)`", row.split("|")[1])}
    assert explained == {end for mark, _ in LEGEND for end in mark.split("-")}
