"""`gc` removes what is of no use to anybody, and nothing else."""

import errno
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, Queue, RankInUseError, WriterActiveError
from shmstore.bindings import inspect as native
from shmstore.cli.commands import gc
from shmstore.files import PREFIX, holders
from shmstore.inspect.records import SegmentInfo
from shmstore.inspect.segments import find_segments, look_at, remove_segment
from tests.inspect.cases import CONDITIONS, OPTIONS, case, peek, piped, poke, running, stop
from tests.layout import FIELDS
from tests.support import SHM, store_name

pytestmark = pytest.mark.alone
ALIVE = ("live", "stopped")
RECOVERABLE = ("dead", "other version")
USELESS = ("damaged", "spoiled", "cut", "unfinished", "ephemeral")


def make_old(name: str) -> None:
    os.utime(SHM / name, (0, time.time() - 100))


@pytest.mark.parametrize("options", [(), ("--yes",), ("--yes", "--force")])
@pytest.mark.parametrize("condition", [c for c in CONDITIONS if c != "foreign"])
def test_what_is_removed(condition: str, options: tuple[str, ...]) -> None:
    with case(condition) as name:
        make_old(name)
        ran = piped("gc", name, *options, "--json")
        removable = condition in USELESS or ("--force" in options and condition in RECOVERABLE)
        gone = removable and "--yes" in options
        assert gone is not (SHM / name).exists()
        assert (1 if condition in ALIVE else 0) == ran.status
        for row in ran.json["segments"]:
            assert (gone, not removable) == (row["removed"], row["kept_because"] != [])
        if condition in ALIVE:
            said = piped("gc", name, *options)
            assert ("", f"shmstore gc: {name}: its writer is alive, so it stays\n") == (said.out, said.err)


def test_without_names_all_are_looked_at_and_foreign_files_never() -> None:
    with case("damaged") as damaged, case("dead") as dead, case("live") as live, case("foreign") as foreign:
        verdicts = {row["segment"]["name"]: row["kept_because"] for row in piped("gc", "--json").json["segments"]}
        assert ([], ["could be recovered"]) == (verdicts[damaged], verdicts[dead])
        assert not {live, foreign} & set(verdicts)
        shown = piped("gc")
        assert 0 == shown.status
        row = next(line for line in shown.out.splitlines() if damaged in line)
        assert row.rstrip().endswith("would be removed")
        assert 1 == piped("gc", foreign).status


def test_a_dead_store_whose_name_nobody_knows_is_called_so_and_not_recoverable() -> None:
    with case("ephemeral") as ephemeral, case("dead") as dead:
        rows = [piped("gc", name, "--json").json["segments"][0] for name in (ephemeral, dead)]
        assert [(True, []), (False, ["could be recovered"])] == [
            (row["segment"]["ephemeral"], row["kept_because"]) for row in rows
        ]
        shown = piped("gc", ephemeral).out
        assert "would be removed: ephemeral" in shown
        assert "recover" not in shown
        with running(ephemeral, _attached):  # who reads it knows its name
            assert "could be recovered" in piped("gc", ephemeral, "--json").json["segments"][0]["kept_because"]


def test_a_sparse_copy_is_not_said_to_be_recoverable() -> None:
    with case("dead") as name:
        path = SHM / name
        size, first = path.stat().st_size, path.read_bytes()[:4096]
        path.write_bytes(first)
        os.truncate(path, size)
        path.chmod(0o600)
        ran = piped("gc", name)
        assert (0, True, False) == (ran.status, "kept: sparse" in ran.out, "could be recovered" in ran.out), ran.out


def test_a_store_is_kept_while_an_arena_of_it_is_sound() -> None:
    name = store_name()
    with ObjectStoreWriter.create(name, **OPTIONS, n_writers=3) as writer:  # nobody ever has the third arena
        ObjectStoreWriter.join(name).close(unlink=False)
        writer.close(unlink=False)
    try:
        for arena, (reasons, has_figures) in enumerate([(["could be recovered"], True), ([], False)]):
            poke(SHM / name, FIELDS["next_id"] + arena * peek(SHM / name, FIELDS["arena_stride"]), 1 << 63)
            (row,) = piped("gc", name, "--json").json["segments"]
            assert (reasons, "damaged") == (row["kept_because"], row["segment"]["state"])
            watched = piped("top", "--iterations", "1", "--json")
            (store,) = (store for store in watched.json["stores"] if store["segment"]["name"] == name)
            assert (1, True) == (watched.status, name in watched.err)
            assert has_figures == (store["segment"]["facts"] is not None)
        assert [0, False] == [piped("gc", name, "--yes").status, (SHM / name).exists()]
    finally:
        (SHM / name).unlink(missing_ok=True)


def test_a_store_that_is_taken_over_meanwhile_stays_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(segment: SegmentInfo, *, force: bool) -> None:
        writer = ObjectStoreWriter.recover(segment.name)
        try:
            remove_segment(segment, force=force)
        finally:
            writer.close(unlink=False)

    monkeypatch.setattr(gc, "remove_segment", late)
    with case("dead") as name:
        ran = piped("gc", name, "--yes", "--force")
        assert (1, True, True) == (ran.status, f"{name}: " in ran.err, "NOT removed" in ran.out)
        assert (SHM / name).exists()


def test_a_store_is_kept_if_only_what_a_reader_wrote_is_spoiled() -> None:
    with case("dead") as name:
        with (SHM / name).open("r+b") as file:
            file.seek(peek(SHM / name, FIELDS["readers_at"]) + 128)
            file.write(b"\x55" * 2048)
        (row,) = piped("gc", name, "--yes", "--json").json["segments"]
        assert ("damaged", ["could be recovered"]) == (row["segment"]["state"], row["kept_because"])
        with ObjectStoreWriter.recover(name) as writer:
            assert 0 < writer.recovered


def test_a_name_that_is_no_store_ends_the_command_and_a_living_store_is_left_out() -> None:
    with case("dead") as dead, case("live") as live:
        assert (1, True) == (piped("gc", "--yes", "--force", dead, "none").status, (SHM / dead).exists())
        ran = piped("gc", "--yes", "--force", live, dead)
        assert (1, False, True) == (ran.status, (SHM / dead).exists(), (SHM / live).exists())


def test_force_without_names_is_refused() -> None:
    with case("dead") as dead:
        for options in (["--force"], ["--yes", "--force"], ["--yes", "--force", "--json"]):
            ran = piped("gc", *options)
            assert (2, True) == (ran.status, (SHM / dead).exists())
            assert "--force needs the names" in ran.err


def _attached(name: str, ready: int) -> None:
    reader = ObjectStoreReader.attach(name, 1)
    os.write(ready, b"r")
    signal.pause()
    reader.close()


def _mapping(name: str, ready: int) -> None:
    inspector = native.Inspector(name)
    os.write(ready, b"r")
    signal.pause()
    inspector.close()


def _opened(name: str, ready: int) -> None:
    with (SHM / name).open("rb"):
        os.write(ready, b"r")
        signal.pause()


@pytest.mark.parametrize("holder", [_attached, _mapping, _opened])
def test_what_a_process_maps_stays_unless_forced(holder: object) -> None:
    with case("dead") as name:
        with running(name, holder) as child:  # type: ignore[arg-type]
            stop(child.pid)  # a stopped process holds, too
            (row,) = piped("gc", name, "--yes", "--json").json["segments"]
            assert [f"mapped by {child.pid}", "could be recovered"] == row["kept_because"]
            assert [child.pid] == row["mapped_by"]
            shown = piped("gc", name).out
            assert f"kept: mapped by {child.pid}; could be recovered\n" in shown
            assert "ObjectStoreWriter.open(NAME, ...) takes it over" in shown
            assert (SHM / name).exists()
            assert 0 == piped("gc", name, "--yes", "--force").status
            assert not (SHM / name).exists()


def test_a_creation_that_has_just_begun_is_left_alone(folder: Path) -> None:
    """Its creator has made the file, and not yet locked it."""
    (folder / PREFIX).touch()
    ran = piped("gc", "--yes", "--dir", str(folder))
    assert (0, True) == (ran.status, (folder / PREFIX).exists())
    make_old(str(folder / PREFIX))
    assert 0 == piped("gc", "--yes", "--dir", str(folder)).status
    assert not (folder / PREFIX).exists()


def test_a_blank_file_of_a_dead_creator_is_ours_by_its_name() -> None:
    ours, anyones = f"shmstore-{os.getpid()}-0", store_name()
    try:
        for name in (ours, anyones):
            with (SHM / name).open("wb") as file:
                file.truncate(1 << 20)
            make_old(name)
        assert "unfinished" == look_at(ours).state
        assert (0, 1) == (piped("gc", ours, "--yes").status, piped("gc", anyones, "--yes", "--force").status)
        assert (False, True) == ((SHM / ours).exists(), (SHM / anyones).exists())
    finally:
        (SHM / ours).unlink(missing_ok=True)
        (SHM / anyones).unlink()


def test_a_young_empty_file_is_not_said_to_have_a_writer() -> None:
    name = f"shmstore-{os.getpid()}-0"
    (SHM / name).touch(0o600)
    try:
        said = piped("gc", name, "--yes")
        assert (1, f"shmstore gc: {name}: its creation is not over, so it stays\n") == (said.status, said.err)
    finally:
        (SHM / name).unlink()


def test_removal_asks_again_under_the_lock() -> None:
    with case("dead") as name:
        info = look_at(name)
        with running(name, _attached):
            with pytest.raises(RankInUseError):
                remove_segment(info)
        heir = ObjectStoreWriter.recover(name)
        with pytest.raises(WriterActiveError):
            remove_segment(info, force=True)
        heir.close(unlink=True)
        with ObjectStoreWriter.create(name, **OPTIONS):
            with pytest.raises((FileNotFoundError, WriterActiveError)):
                remove_segment(info, force=True)
        ObjectStoreWriter.create(name, **OPTIONS).close(unlink=False)
        later = look_at(name)
        if later.inode != info.inode:
            with pytest.raises(FileNotFoundError):
                remove_segment(info, force=True)
        remove_segment(later)
        assert not (SHM / name).exists()


def wait(_: str, ready: int) -> None:
    os.write(ready, b"r")
    signal.pause()


def test_holders_are_the_processes_that_map_or_open_a_file() -> None:
    with case("live") as name:
        info = look_at(name)
        with running(store_name(), wait) as other:
            found = holders(info.device, info.inode)
            assert len(found) >= 1
            assert other.pid not in found
            assert os.getpid() not in found


def test_what_a_server_that_is_gone_had_hides_no_holder_and_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with case("live") as name:
        info = look_at(name)
        found = holders(info.device, info.inode)
        gone = Mock(side_effect=OSError(errno.ESTALE, "of a server that is gone"))
        (tmp_path / "link").symlink_to("nowhere")
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", gone)
            patch.setattr(os, "readlink", gone)
            assert found == holders(info.device, info.inode)
            assert [] == find_segments(dir=tmp_path)


def test_a_queue_of_the_dead_is_shown_and_removed_and_others_stay(folder: Path) -> None:
    kept = "shmstore-queue-kept"
    Queue("1 MiB", dir=folder, name=kept).close()
    with Queue("1 MiB", dir=folder), Queue("1 MiB", dir=folder, name="named"):
        dead = folder / "shmstore-queue-dead"
        (dead / "waiting").mkdir(parents=True)
        assert [str(dead)] == piped("gc", "--json", "--dir", str(folder)).json["queues"]
        for option, said in ((), "would be removed\nadd --yes to remove\n"), (("--yes",), "removed\n"):
            assert f"{dead}: a queue whose processes are dead, {said}" == piped("gc", "--dir", str(folder), *option).out
        assert not dead.exists()
        assert 3 == len(os.listdir(folder))
    for name in ("named", kept):
        Queue.unlink(name, dir=folder)
