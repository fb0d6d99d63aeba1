"""What the host does to stores: it removes names, has little room, or lets a crashed process live on."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmstore.inspect.host import look_at_host
from tests.inspect.cases import piped

CONF = "etc/systemd/logind.conf"
DROP_IN = "systemd/logind.conf.d/50.conf"


def host(root: Path, *files: tuple[str, str]) -> str:
    for name, text in (("run/systemd/seats/x", ""), *files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ((), True),
        (((CONF, "[Login]\n#RemoveIPC=no\n"),), True),
        (((CONF, "[Login]\nRemoveIPC=no\n"),), False),
        (((CONF, "RemoveIPC=no"), (f"etc/{DROP_IN}", "RemoveIPC = yes\n")), True),
        (((CONF, "RemoveIPC=yes"), (f"usr/lib/{DROP_IN}", "RemoveIPC=off\n")), False),
        (((f"usr/lib/{DROP_IN}", "RemoveIPC=no"), (f"etc/{DROP_IN}", "RemoveIPC=yes")), True),
        ((("var/lib/systemd/linger/engines", ""),), False),
    ],
)
def test_whether_logind_removes_names_is_read_as_logind_reads_it(
    files: tuple[tuple[str, str], ...], removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = host(tmp_path, *files)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="engines"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    seen = look_at_host("/dev/shm", root)
    assert (removes, removes) == (seen.removes_ipc, any("RemoveIPC=no" in problem for problem in seen.problems))
    assert not look_at_host(str(tmp_path), root).removes_ipc
    for user in (0, 999):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert not look_at_host("/dev/shm", root).removes_ipc


@pytest.mark.parametrize(
    ("pattern", "limit", "said"), [("|/usr/lib/dump %P", 0, 1), ("core", 0, 0), ("core", -1, 1), ("", -1, 0)]
)
def test_a_core_pattern_that_keeps_a_crashed_process_is_a_note(
    pattern: str, limit: int, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert said == len(look_at_host("/dev/shm", host(tmp_path, ("proc/sys/kernel/core_pattern", f"{pattern}\n"))).notes)


@pytest.mark.parametrize(("free", "status"), [(4, 1), (50, 0)])
def test_a_folder_without_room_makes_the_exit_status_1(free: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda at: SimpleNamespace(f_blocks=100, f_frsize=1, f_bavail=free))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ran = piped("verify", "--host", "--dir", "/dev/shm", "--json")
    assert (status, status == 0, free) == (ran.status, ran.json["ok"], ran.json["host"]["free_bytes"])
    said = piped("verify", "--host", "--dir", "/dev/shm")
    assert (status, status) == (said.status, said.out.count("nearly full"))


def test_a_host_and_a_store_are_not_checked_at_once() -> None:
    assert [2, 2] == [piped("verify", *both).status for both in ((), ("--host", "a"))]
