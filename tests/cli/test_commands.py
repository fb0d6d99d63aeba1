"""Each command on segments in every condition, into a pipe and on a terminal."""

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from shmstore import ObjectStoreWriter, PickleSerde
from shmstore.cli import main as cli
from shmstore.cli.commands import bench, dump, tables, top
from shmstore.cli.commands.tables import make_fitting_table, make_table
from shmstore.cli.main import all_commands
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.ring import ring_map
from shmstore.inspect.segments import look_at
from shmstore.inspect.verify import damage
from tests.inspect.cases import CONDITIONS, WIDTH, Ran, Terminal, case, on_terminal, piped, poke, running, three_writers
from tests.support import SHM, Stores, store_name

pytestmark = pytest.mark.alone
READABLE = ("live", "stopped", "dead", "ephemeral")
NAMED = {"dump": (), "verify": (), "top": ("--iterations", "1"), "gc": ()}
STATE = {
    "damaged": "damaged",
    "spoiled": "damaged",
    "cut": "damaged",
    "unfinished": "unfinished",
    "other version": "other version",
    "ephemeral": "ok, ephemeral",
}


def expected_status(command: str, condition: str) -> int:
    if command == "gc":  # it leaves live writers alone, and files that are not stores
        return 1 if condition in ("live", "stopped", "foreign") else 0
    return 0 if condition in READABLE else 1


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("command", NAMED)
def test_a_command_ends_with_its_status_in_pipe_and_terminal_and_changes_no_byte(command: str, condition: str) -> None:
    with case(condition) as name:
        before = (SHM / name).read_bytes()
        ran = piped(command, name, *NAMED[command])
        assert (expected_status(command, condition), before) == (ran.status, (SHM / name).read_bytes()), ran
        assert "Traceback" not in ran.err
        assert name in ran.out + ran.err
        assert "\x1b" not in ran.out, "an escape sequence in a pipe"
        if ran.status == 1 and (command, condition) != ("verify", "spoiled"):  # which lists what is wrong
            assert re.fullmatch(rf"shmstore {command}: .*\n", ran.err), "an error is one line"
        if condition in ("live", "damaged"):
            on_screen = on_terminal(command, name, *NAMED[command])
            assert (ran.status, True) == (on_screen.status, name in on_screen.out), on_screen
            assert "Traceback" not in on_screen.out


@pytest.mark.parametrize("condition", [*CONDITIONS, "being created"])
def test_a_quick_look_tells_a_living_writer_from_every_other_condition(condition: str) -> None:
    with case("live" if condition == "being created" else condition) as name:
        if condition == "being created":
            poke(SHM / name, 8, 0)
        before = (SHM / name).read_bytes()
        ran, as_json = piped("verify", name, "--quick"), piped("verify", name, "--quick", "--json")
        assert (0 if condition in ("live", "stopped") else 1) == ran.status == as_json.status, ran
        assert before == (SHM / name).read_bytes()
        assert name in (ran.err if ran.status else ran.out)
        assert (ran.status == 0, as_json.json["problem"] is None) == (as_json.json["ok"], as_json.json["ok"])
        assert ("", 1 if condition in ("live", "stopped", "being created") else 0) == (
            as_json.err,
            as_json.json["file"]["ranks_alive"],
        )
    gone = piped("verify", name, "--quick")
    assert (1, True) == (gone.status, name in gone.err)


def test_the_version_is_that_of_the_installed_package() -> None:
    ran = piped("--version")
    assert (0, f"shmstore {version('shmstore')}\n", "") == (ran.status, ran.out, ran.err)


def test_a_quick_look_starts_without_what_takes_long_to_load() -> None:
    program = """
import sys
from shmstore.cli.main import main
status = main(["verify", sys.argv[1], "--quick"])
print(status, *{"numpy", "rich", "torch"}.intersection(sys.modules))
"""
    with case("live") as name:
        command = [sys.executable, "-c", program, name]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ("", "0") == (ran.stderr, ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(("command", "prefix"), [*((command, "/dev/shm/") for command in NAMED), ("dump", "/")])
def test_a_store_may_be_named_by_its_file(command: str, prefix: str) -> None:
    with case("dead") as name:
        by_name, by_path = (piped(command, given, *NAMED[command]) for given in (name, prefix + name))
        assert (0, 0, "") == (by_name.status, by_path.status, by_path.err)
        assert name in by_path.out
        assert prefix + name not in by_path.out


@pytest.mark.parametrize(
    ("run", "condition"), [*((piped, condition) for condition in CONDITIONS), (on_terminal, "live")]
)
def test_ls_shows_what_is_ours_and_its_condition(
    run: object, condition: str, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also next to a store whose name leaves no room for columns on a usual screen."""
    monkeypatch.setattr(tables, "_PLAIN_WIDTH", WIDTH)
    stores.create(name=store_name() + "x" * 150)
    with case(condition) as name:
        rows = [row for row in run("ls").out.splitlines() if name in row]  # type: ignore[operator]
        if condition == "foreign":
            assert [] == rows
            return
        assert STATE.get(condition, "ok") in rows[0]
        assert ("alive" if condition in ("live", "stopped") else "dead") in rows[0]
        if condition in READABLE:
            assert f"{1 if condition in ('live', 'stopped') else 0} of 2" in rows[0]


@pytest.mark.parametrize("command", ["ls", "top", "gc", "dump", "verify"])
def test_what_another_process_named_is_shown_as_it_is_and_commands_no_terminal(command: str, stores: Stores) -> None:
    odd = "[red]\x1b[2J\udcff"
    name = store_name() + odd
    with stores.create(name=name) as writer:
        writer.put("key" + odd.replace("\udcff", ""), {odd.replace("\udcff", "\ud800"): torch.zeros(2)})
        whose = () if command == "ls" else ("--iterations", "1") if command == "top" else (name,)
        rans = [piped(command, *whose)]
        if command == "dump":
            rans.append(piped(command, name, "--object", "1"))
    for ran, shown in zip(rans, (r"[red]\x1b[2J\udcff", r"[red]\x1b[2J\ud800"), strict=False):
        text = ran.out + ran.err
        assert shown in text, ran
        assert "\x1b" not in text
        assert (1 if command == "gc" else 0) == ran.status


@pytest.mark.parametrize("command", NAMED)
def test_a_pattern_in_the_place_of_a_name_is_led_to_ls(command: str) -> None:
    ran = piped(command, "none-*", *NAMED[command])
    assert 1 == ran.status
    assert "shmstore ls 'none-*'" in ran.err


def test_verify_lists_eight_of_many_alike_and_counts_the_rest(stores: Stores) -> None:
    with stores.create(n_readers=1, serde=PickleSerde()) as writer:
        for n in range(50):
            writer.put(f"k{n}", n, lease=False)
        ran, as_json = piped("verify", writer.name), piped("verify", writer.name, "--json")
    lines = ran.out.splitlines()
    assert (0, 10, 50) == (ran.status, len(lines), len(as_json.json["report"]["findings"]))
    assert "note   42 more of this kind (metadata), which --json lists" == lines[8]


def ls_entry(name: str) -> dict[str, Any]:
    ran = piped("ls", "--json")
    assert ran.status == (0 if ran.json["ok"] else 1)
    return next(entry for entry in ran.json["segments"] if entry["name"] == name)


def test_ls_json_has_the_figures() -> None:
    with case("live") as name:
        entry = ls_entry(name)
        assert ("ok", True, 1, 1, False) == tuple(
            entry[name] for name in ("state", "writer_alive", "writers_alive", "ranks_alive", "ephemeral")
        )
        assert (1 << 16, 6, 2) == tuple(entry["facts"][name] for name in ("capacity", "objects", "n_readers"))
    with case("damaged") as name:
        entry = ls_entry(name)
        assert (False, "damaged", None) == (entry["writer_alive"], entry["state"], entry["facts"])
        assert 1 == piped("ls").status


def test_every_command_has_help_with_an_example_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    for command in all_commands():
        assert 0 == cli.main([command.name, "--help"])
        assert f"example: {command.example}" in capsys.readouterr().out
        assert 2 == cli.main([command.name, "--no-such-option"])
    for wrong in ("0", "x"):
        assert 2 == cli.main(["top", "--interval", wrong])
        assert 2 == cli.main(["ls", "--pid", wrong])
    assert 2 == cli.main(["dump", "x", "--out", "y"])
    assert "--out needs --tensor" in capsys.readouterr().err
    assert 2 == cli.main(["dump", "x", "--namespace", "a"])
    assert 2 == cli.main(["dump", "x", "--tensor", "pixels"])
    assert 2 == cli.main(["dump", "x", "--tensor", "pixels", "--out", "y"])
    assert 2 == cli.main(["dump", "x", "--object", "1", "--tensor", "pixels", "--out", "y", "--svg", "z"])
    assert 2 == cli.main(["dump", "x", "--key", "a", "--object", "1"])
    for name in ("dump", "top"):
        assert 2 == cli.main([name, "x", "--json", "--svg", "y"])


def test_ls_shows_the_stores_whose_name_matches(stores: Stores) -> None:
    name, other = (stores.create(name=store_name()).name for _ in range(2))
    shown = {segment["name"] for segment in piped("ls", f"?{name[1:]}", "--json").json["segments"]}
    assert (True, False) == (name in shown, other in shown)
    assert "matches none" in (ran := piped("ls", "none")).out
    assert ran.status == 0


def test_without_a_command_all_of_them_are_listed() -> None:
    ran = piped()
    assert (2, "") == (ran.status, ran.out)
    listed = {words[0] for words in map(str.split, ran.err.splitlines()) if words}
    assert {command.name for command in all_commands()} <= listed


@pytest.mark.parametrize("command", NAMED)
def test_what_is_no_store_is_called_so(command: str, tmp_path: Path) -> None:
    folder = SHM / store_name()
    folder.mkdir()
    try:
        ran = piped(command, str(folder), *NAMED[command])
        assert (1, True, True) == (ran.status, str(folder) in ran.err, "another name" in ran.err), ran
    finally:
        folder.rmdir()
    elsewhere = tmp_path / "file"
    elsewhere.touch()
    for path in (tmp_path, elsewhere):
        ran = piped(command, str(path), *NAMED[command])
        assert (1, True, True) == (ran.status, str(path) in ran.err, "another name" in ran.err), ran
    ran = piped(command, str(tmp_path / "absent"), *NAMED[command])
    assert (1, True) == (ran.status, "shmstore ls" in ran.err), ran


def test_a_store_whose_first_page_is_lost_is_removed_by_rm_as_every_command_says() -> None:
    with case("foreign") as name:
        for command in ("gc", name, "--yes", "--force"), ("verify", name), ("verify", name, "--quick"):
            ran = piped(*command)
            assert (1, True) == (ran.status, re.search(r"\(hint: .*\brm\b", ran.err) is not None), ran


def test_top_of_all_judges_as_ls_does_and_of_one_as_dump_does() -> None:
    with case("dead") as sound, case("unfinished") as unfinished:
        everything = [piped("ls"), piped("top", "--iterations", "1")]
        one = [piped(*command, unfinished) for command in (("dump",), ("top", "--iterations", "1"))]
        assert [False, False, True, True] == [unfinished in ran.err for ran in (*everything, *one)]
        assert [1, 1] == [ran.status for ran in one]
        looks = piped("top", "--iterations", "2", "--interval", "0.05", "--json", unfinished).out.splitlines()
        assert [False, False] == [json.loads(look)["ok"] for look in looks]
        for condition in ("damaged", "spoiled"):
            with case(condition) as damaged:
                everything = [piped("ls"), piped("top", "--iterations", "1"), piped("dump", damaged)]
                assert [(1, True)] * 3 == [(ran.status, damaged in ran.err) for ran in everything]
                reports = [piped(*command, "--json") for command in (("top", "--iterations", "1"), ("dump", damaged))]
                assert [False, False] == [ran.json["ok"] for ran in reports]
        assert 0 == piped("top", sound, "--iterations", "1").status


def test_top_checks_the_tables_of_a_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def counted(inspector: StoreInspector) -> dict[int, str]:
        checked.append(inspector.name)
        return damage(inspector)

    monkeypatch.setattr("shmstore.inspect.segments.damage", counted)
    with case("spoiled") as one, case("live") as other:
        watcher = top.Watcher(None)
        for _ in range(3):
            watcher.sample()
        assert [1, 1] == [checked.count(name) for name in (one, other)]
        assert [(True, False)] == [
            (one in text, other in text) for text in watcher.wrong() if one in text or other in text
        ]


def test_output_cut_short_by_its_reader_is_no_error() -> None:
    with case("live") as name:
        reading, writing = os.pipe()
        os.close(reading)
        pid = os.fork()
        if pid == 0:
            os.dup2(writing, 1)
            sys.stdout = os.fdopen(1, "w")
            os._exit(cli.main(["dump", name]))
        os.close(writing)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_output_that_is_full_is_one_line(options: tuple[str, ...]) -> None:
    with case("dead") as name, open("/dev/full", "w") as full:
        for arguments in (("dump", name), ("dump", "none")):
            command = [sys.executable, "-m", "shmstore", *arguments, *options]
            ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            assert (1, 1) == (ran.returncode, ran.stderr.count("\n")), ran.stderr


def test_a_picture_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    with case("dead") as name:
        assert 0 == piped("dump", name, "--svg", str(tmp_path / "dump.svg")).status
    drawn = (tmp_path / "dump.svg").read_text(encoding="utf-8")
    assert ('url("http' in drawn, name in drawn) == (False, True)


@pytest.mark.parametrize("option", [("--svg",), ("--key", "key-1", "--tensor", "pixels", "--out")])
def test_a_file_that_cannot_be_made_is_named_with_a_hint(option: tuple[str, ...], tmp_path: Path) -> None:
    with case("dead") as name:
        for path in (tmp_path / "none" / "file", tmp_path):
            ran = piped("dump", name, *option, str(path))
            assert (1, True, False) == (ran.status, f"{path}: " in ran.err, "Errno" in ran.err)
            assert "hint: pass another path" in ran.err
        ran = piped("dump", name, *option, str(tmp_path / ("x" * 300)))
        assert (1, True, False) == (ran.status, "File name too long" in ran.err, "hint" in ran.err)


@pytest.mark.parametrize("option", [("--svg",), ("--key", "key-1", "--tensor", "pixels", "--out")])
def test_a_file_to_write_replaces_the_old_one_and_no_store(option: tuple[str, ...], tmp_path: Path) -> None:
    """A process may have mapped the old file, and would die of SIGBUS if it were cut short."""
    (old := tmp_path / "old").write_bytes(b"old")
    (link := tmp_path / "link").symlink_to(old)
    with case("live") as name, old.open("rb") as mapped:
        before = (SHM / name).read_bytes()
        for path in (f"/dev/shm/{name}", link):
            link.unlink()
            link.symlink_to(SHM / name)
            ran = piped("dump", name, *option, str(path))
            assert (1, True, before) == (ran.status, f"{path} is a store" in ran.err, (SHM / name).read_bytes()), ran
        link.unlink()
        link.symlink_to(old)
        old.chmod(0o600)
        assert 0 == piped("dump", name, *option, str(link)).status
        assert (b"old", True, {old, link}) == (mapped.read(), old.stat().st_size > 3, set(tmp_path.iterdir()))
        assert 0o600 == old.stat().st_mode & 0o777
        assert 0 == piped("dump", name, *option, "/dev/null").status
        command = [sys.executable, "-m", "shmstore", "dump", name, *option, "/dev/stdout"]
        assert old.read_bytes()[:6] == subprocess.run(command, capture_output=True, check=True, timeout=60).stdout[:6]
        for path, status, said in (("/dev/full", 1, "/dev/full: No space"), ("", 2, "is empty")):
            ran = piped("dump", name, *option, path)
            assert (status, True) == (ran.status, said in ran.err), ran


# ---- dump


def ring_of(ran: Ran) -> str:
    """Return the marks of the ring in a dump, joined."""
    lines = ran.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("ring"))
    end = next(i for i, line in enumerate(lines) if "pinned by that rank" in line)
    rows = [line for line in lines[start + 1 : end] if line.strip() != "v"]
    return "".join(re.sub(r"^ *\S+ (B|KiB|MiB) {2}", "", row) for row in rows)


def test_the_ring_shows_who_holds_what(stores: Stores) -> None:
    writer = stores.create(capacity=64 * 1024, n_readers=3, max_objects=16)
    readers = [stores.attach(writer, rank) for rank in range(3)]
    tensor = torch.zeros(8 * 1024 - 64, dtype=torch.uint8)  # with key and metadata: an eighth of the ring
    refs = [writer.put(f"k{i}", tensor) for i in range(7)]
    views = [readers[0].get(refs[0]), readers[0].get(refs[1]), readers[2].get(refs[1])]
    for ref, ranks in zip(refs[2:6], ((0, 2), (0,), (0, 1, 2), (0, 1, 2)), strict=True):
        for rank in ranks:
            readers[rank].release(ref)
    for rank in (1, 2):
        readers[rank].release(refs[0])
    readers[1].release(refs[1])
    with writer.reserve("open", {"x": torch.zeros(100, dtype=torch.uint8)}) as space:
        marks = ring_of(piped("dump", writer.name))
        del space
    assert ["0", "P", "b", "L", "o", "o", "L"] == [marks[len(marks) * i // 8 + 2] for i in range(7)]
    assert {"w", "."} == set(marks[len(marks) * 7 // 8 + 1 :])
    assert marks[-1] == "."
    memory = {
        row.split()[0]: row for row in piped("dump", writer.name).out.splitlines() if " KiB" in row and "%" in row
    }
    assert "2   16 KiB" in re.sub(" +", "   ", memory["pinned"]).replace("   KiB", " KiB")
    del views


def test_a_cell_shows_what_is_hardest_to_free_in_it(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=1, max_objects=16)
    reader = stores.attach(writer)
    view = writer.put("v", torch.ones(3))
    refs = [writer.put(f"k{i}", i) for i in range(5)]
    seen = []
    with StoreInspector.open(writer.name) as inspector:
        for step in (lambda: None, lambda: [reader.release(ref) for ref in refs], lambda: reader.release(view)):
            step()
            seen.append(ring_map(inspector.snapshot(), 1).cells)
        kept = reader.get(writer.get_cached("v"))
        writer.get_cached("k4")
        seen.append(ring_map(inspector.snapshot(), 1).cells)
        del kept
    assert [("a",), ("a",), ("o",), ("0",)] == seen


def test_the_hand_is_above_its_cell(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16)
    writer.put("a", torch.zeros(20000, dtype=torch.uint8))
    lines = piped("dump", writer.name).out.splitlines()
    row = next(i for i, line in enumerate(lines) if line.strip() == "v")
    column = lines[row].index("v")
    assert ("a", ".") == (lines[row + 1][column - 1], lines[row + 1][column + 1])


def test_dump_json_names_everything() -> None:
    with case("live") as name:
        snapshot = piped("dump", name, "--json").json["snapshot"]
    assert [f"key-{n}" for n in range(1, 7)] == [slot["key"] for slot in snapshot["slots"]]
    assert [[0], [], [], [], [], []] == [slot["pinned_by"] for slot in snapshot["slots"]]
    assert [[1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1]] == [
        [rank for rank in slot["leased_to"] if (slot["key"], rank) != ("key-1", 0)] for slot in snapshot["slots"]
    ]
    assert [False] * 5 + [True] == [slot["deleted"] for slot in snapshot["slots"]]
    assert ["alive", "awaited"] == [reader["state"] for reader in snapshot["readers"]]
    assert list(range(1, 9)) == [lease["number"] for lease in snapshot["leases"]]
    assert ["checksums"] == snapshot["facts"]["options"]


def test_a_rank_is_shown_with_its_state_and_what_a_death_has_left(stores: Stores) -> None:
    with StoreInspector.open(stores.create(n_readers=4).name) as inspector:
        readers = [replace(reader, attachments=1) for reader in inspector.readers()]
    shown = io.StringIO()
    changes: list[dict[str, Any]] = [
        {"state": "alive", "retired": True, "pins": 2},
        {"state": "retired", "retired": True},
        {"state": "dead", "pins_left": 1},
        {"state": "closed"},
    ]
    ranks = [replace(reader, **change) for reader, change in zip(readers, changes, strict=True)]
    Console(width=200, file=shown).print(tables.readers_table(Console(), ranks))
    expected = [("alive, retired", "2"), ("retired", "0"), ("dead", "0 (1 left)"), ("closed", "0")]
    cells = [re.split("  +", line.strip()) for line in shown.getvalue().splitlines()[-4:]]
    assert expected == [(row[2], row[4]) for row in cells]


def test_dump_of_one_object_shows_its_tree_and_copies_a_tensor_out(tmp_path: Path) -> None:
    with case("dead") as name:
        shown = piped("dump", name, "--key", "key-3")
        assert "pixels: tensor int32 (3, 100)" in shown.out
        assert "n: 3" in shown.out
        tree = piped("dump", name, "--object", "3", "--json").json["tree"]
        assert [("pixels", [3, 100], 1200), ("n", None, 0)] == [
            (part["path"], part["shape"], part["nbytes"]) for part in tree
        ]
        out = tmp_path / "tensor"
        for options in ((), ("--json",)):
            ran = piped("dump", name, "--object", "3", "--tensor", "pixels", "--out", str(out), *options)
            assert 0 == ran.status
        assert [3, 100] == ran.json["shape"]
        np.testing.assert_array_equal(np.full((3, 100), 3, np.int32), np.load(out))
        for arguments in (
            ("--key", "none"),
            ("--object", "99"),
            ("--object", "3", "--tensor", "n", "--out", str(out)),
            ("--object", "3", "--tensor", "pixels", "--out", str(tmp_path / "no" / "where")),
        ):
            assert 1 == piped("dump", name, *arguments).status


def test_where_there_is_no_tensor_or_store_the_hint_names_what_the_command_has(stores: Stores) -> None:
    writer = stores.create()
    writer.put("text", "no tensor")
    ran = piped("dump", writer.name, "--key", "text", "--tensor", ".", "--out", "/dev/null")
    assert (1, True, False) == (ran.status, "the object has none" in ran.err, "one of" in ran.err), ran
    ran = piped("dump", "--pid", str(os.getpid()), "1")
    assert (1, True) == (ran.status, "ls --pid" in ran.err), ran


def test_the_operators_guide_has_each_column_of_each_table_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, set[str]] = {}

    def noted(console: Console, title: str, *columns: str, **options: Any) -> Any:
        drawn[title] = set(columns)
        return make_table(console, title, *columns, **options)

    for module in (dump, tables):
        monkeypatch.setattr(module, "make_table", noted)
    with three_writers() as (writer, _):
        writer.put("k", 1, namespace="n")
        with StoreInspector.open(writer.name) as inspector:
            dump.draw_snapshot(Console(width=400, file=io.StringIO()), inspector.snapshot(), everything=True)
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "operators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z]+) \| (.*) \|$", guide, re.M)
    assert drawn == {title: set(re.findall(r"\*([a-z ]+)\*", row)) for title, row in rows if title in drawn}


def test_long_tables_are_cut_and_say_so(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 20)
    for i in range(60):
        writer.put(f"key-{i}", i)
    short, long = piped("dump", writer.name), piped("dump", writer.name, "--all")
    assert (20, 60) == tuple(sum("key-" in line for line in ran.out.splitlines()) for ran in (short, long))
    assert "of 60 (--all" in short.out


def test_ranks_that_nobody_was_are_one_line_if_they_are_many(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=11)
    readers = [stores.attach(writer, rank) for rank in (1, 4)]
    assert 2 == len(readers)

    def ranks(*options: str, command: str = "dump") -> tuple[str, list[str]]:
        lines = piped(command, writer.name, *options).out.splitlines()
        title = next(i for i, line in enumerate(lines) if line.startswith(("readers", "ranks")))
        rows = lines[title + 2 :]
        return lines[title], [row.split()[0] for row in rows[: rows.index("") if "" in rows else None]]

    title, shown = ranks()
    assert "other 9" in title
    assert ["1", "4"] == shown == ranks("--iterations", "1", command="top")[1]
    assert [str(rank) for rank in range(11)] == ranks("--all")[1]
    writer.put("a", torch.ones(1))  # all of them are waited for
    assert 11 == len(ranks()[1])


def test_without_a_look_up_there_is_no_hit_ratio(stores: Stores) -> None:
    """As in a store whose readers find objects by key: nobody asks a writer."""
    writer = stores.create(capacity=1 << 16, n_readers=1, n_writers=2)
    watcher = top.Watcher(writer.name)
    watcher.sample()

    def ratios() -> tuple[list[int], float | None]:
        (sample,) = watcher.sample()
        ran = [piped("ls"), piped("dump", writer.name), piped("top", writer.name, "--iterations", "1")]
        lines = [[line for line in each.out.splitlines() if writer.name in line or "hit ratio" in line] for each in ran]
        return ["\n".join(each).count(" 0.0 %") for each in lines], sample.recent_hit_ratio

    writer.put("a", torch.ones(1))
    assert ([0, 0, 0], None) == ratios()
    assert "1 put, 0 hits (" in piped("dump", writer.name).out
    with pytest.raises(KeyError):
        writer.get_cached("b")
    writer.put("b", torch.ones(1))
    assert ([1, 4, 4], 0) == ratios()


def test_dump_writes_a_picture(tmp_path: Path) -> None:
    with case("live") as name:
        for command in ("dump", "top"):
            file = tmp_path / f"{command}.svg"
            assert 0 == piped(command, name, "--svg", str(file), *(["--interval", "0.05"] * (command == "top"))).status
            text = file.read_text()
            assert text.startswith("<svg")
            assert name in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_name_is_never_folded_however_narrow_the_screen(width: int) -> None:
    shown = io.StringIO()
    console = Console(width=width, file=shown, force_terminal=True, color_system=None)
    columns = ("name", "owner", "used", "age")
    rows = [(("shmstore-28713-1a827f32", "alive 28713", "233.0 MiB (45 %)", "2 h 3 min"), "")]
    table = make_fitting_table(console, "", columns, rows, left=("name",), spare=("age", "used", "owner"))
    console.print(table)
    drawn = shown.getvalue()
    assert "shmstore-28713-1a827f32" in drawn
    assert {40: (True, False), 80: (True, True), 200: (True, True)}[width] == ("owner" in drawn, "used" in drawn)
    assert all(len(line.rstrip()) <= width for line in drawn.splitlines())


# ---- top


def test_top_in_a_pipe_prints_plain_looks_with_rates(stores: Stores) -> None:
    name = store_name()
    with running(name, _busy):
        ran = piped("top", name, "--iterations", "3", "--interval", "0.2", "--json")
        looks = [json.loads(line)["stores"][0] for line in ran.out.splitlines()]
    assert (0, 3) == (ran.status, len(looks))
    assert 0 == looks[0]["per_second"]["puts"]
    for look in looks[1:]:
        assert look["per_second"]["puts"] > 10
        assert look["per_second"]["put_bytes"] == pytest.approx(400 * look["per_second"]["puts"])
        assert look["per_second"]["evictions"] > 10
        assert 0.4 < look["recent_hit_ratio"] < 0.6


def _busy(name: str, ready: int) -> None:
    writer = ObjectStoreWriter.create(name, capacity=1 << 14, n_readers=1)
    writer.retire(0)
    tensor = torch.zeros(100, dtype=torch.int32)
    for i in range(10**9):
        if i == 100:
            os.write(ready, b"r")  # the store is full by now
        writer.put(f"k{i}", tensor)
        writer.get_cached(f"k{i}")
        with suppress(KeyError):
            writer.get_cached("no such key")
        time.sleep(0.001)


def test_top_draws_a_bar_of_its_width_whatever_a_writer_has_counted(stores: Stores) -> None:
    info = look_at(stores.create().name)
    assert info.facts is not None
    sample = top.take_sample(replace(info, facts=replace(info.facts, used_bytes=(1 << 64) - 1)), None)
    console = Console(file=io.StringIO(), width=150)
    console.print(top.draw_one(console, sample, "rank"))
    assert f" {'#' * 40}\n" in re.sub(" +\n", "\n", console.file.getvalue())  # type: ignore[attr-defined]


def test_top_on_a_terminal_leaves_on_ctrl_c_and_restores_the_screen() -> None:
    with case("live") as name:
        terminal = Terminal("top", name, "--interval", "60")
        terminal.read_until(name)
        terminal.press("\x03")
        ran = terminal.end()
    assert 0 == ran.status
    assert "\x1b[?1049l" in ran.out, "the screen from before is back"


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_where_there_is_no_store_it_says_so(command: str, tmp_path: Path) -> None:
    ran = piped(command, "--dir", str(tmp_path))
    assert (0, 1) == (ran.status, ran.out.count("\n"))


def test_top_of_all_sorts_stores(stores: Stores) -> None:
    small, large = (stores.create(capacity=1 << 20) for _ in range(2))
    large.put("a", torch.zeros(1 << 16))
    for words in (["--sort", "holds"], [small.name, "--sort", "used"]):
        ran = piped("top", "--iterations", "1", *words)
        assert (2, "") == (ran.status, ran.out)
        assert "--sort" in ran.err
    for order, expected in (("name", [small.name, large.name]), ("used", [large.name, small.name])):
        out = piped("top", "--iterations", "1", "--sort", order).out
        assert expected == sorted(expected, key=out.index)


def test_top_follows_a_store_that_goes_and_says_so() -> None:
    with case("live") as name:
        terminal = Terminal("top", name, "--interval", "0.05")
        terminal.read_until("objects")
        (SHM / name).unlink()
        ran = terminal.end()
    assert 1 == ran.status
    assert "there is no store named" in ran.out


# ---- bench


def test_bench_measures_what_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_RING", 16 << 20)
    monkeypatch.setattr(bench.measure, "__defaults__", (0.01, (1 << 10, 1 << 22)))
    assert 0 == cli.main(["bench"])
    out = capsys.readouterr().out
    assert [True, True] == [size in out for size in ("1 KiB", "4 MiB")]
    assert 0 == cli.main(["bench", "--json"])
    assert [1 << 10, 1 << 22] == [figure["nbytes"] for figure in json.loads(capsys.readouterr().out)["figures"]]
    monkeypatch.setattr(bench, "_MOST_ROUNDS", 1000)
    assert 2 == len(bench._interleaved([lambda: None] * 2, math.inf)), "it has no end"
    small, large = bench.measure()
    assert large.put_us > 10 * small.put_us or large.copy_us > 10 * small.copy_us
    assert all(min(f.put_us, f.copy_us, f.get_us, f.hit_us) > 0 for f in (small, large))


def test_demo_says_where_it_is_whatever_follows(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--workers", "3"], ["--help"]):
        assert 2 == cli.main(["demo", *arguments])
        out, err = capsys.readouterr()
        assert ("", 1) == (out, err.count("\n"))
        assert "make demo" in err
