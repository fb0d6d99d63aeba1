"""`shmstore tier check`: what it says of a tier that works, and of one that does not."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from shmstore.cli import main as cli
from shmstore.cli.commands import tier as command
from shmstore.errors import StoreSpaceError, TierError, TierFullError
from shmstore.tiers import Into, mooncake
from shmstore.tiers.directory import DirectoryTier
from tests.inspect.cases import piped
from tests.support import raises
from tests.tiers.memory import MemoryTier

SMALL = ("--sizes", "1K,100KiB", "--count", "3")


def test_a_tier_that_works_is_timed_and_left_as_it_was(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    ran = piped("tier", "check", f"file://{tmp_path}?timeout=20", *SMALL)
    assert (0, "") == (ran.status, ran.err)
    header, *rows, last = ran.out.splitlines()
    assert "publish median" in header
    assert [["1", "KiB"], ["100", "KiB"]] == [row.split()[:2] for row in rows]
    assert last.startswith(f"file://{tmp_path}: 3 values")
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("shmstore-check")]


def test_json_has_the_figures(tmp_path: Path) -> None:
    ran = piped("tier", "check", f"file://{tmp_path}?timeout=20", *SMALL, "--json")
    assert (0, True, None, f"file://{tmp_path}", 3) == (
        ran.status,
        *(ran.json[name] for name in ("ok", "error", "url", "count")),
    )
    assert [1024, 102400] == [figure["nbytes"] for figure in ran.json["figures"]]
    for figure in ran.json["figures"]:
        for call in ("publish", "fetch", "has"):
            assert 0 < figure[call]["median_us"] <= figure[call]["p99_us"]


class Full(DirectoryTier):
    """Has no room for 50,000 bytes."""

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        if sum(span.nbytes for span in spans) > 50_000:
            raise TierFullError("no room", hint="make room")
        super().publish(key, spans)


def test_a_problem_has_a_hint_and_the_sizes_before_it_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "open_tier", lambda _: Full(tmp_path, timeout=20))
    url = f"file://{tmp_path}"
    ran = piped("tier", "check", url, *SMALL)
    assert (1, True, True) == (ran.status, "make room" in ran.err, "1 KiB" in ran.out), ran
    assert 1 == ran.err.count("\n")
    ran = piped("tier", "check", url, *SMALL, "--json")
    assert (1, False, 1) == (ran.status, ran.json["ok"], len(ran.json["figures"]))
    assert "make room" in ran.json["error"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("check",), *(("check", "file:///a", "--sizes", size) for size in ("1K,", "0")), ("no", "file:///a")],
)
def test_wrong_usage_has_status_2(arguments: tuple[str, ...]) -> None:
    assert 2 == cli.main(["tier", *arguments])


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("host:6379", "scheme"),
        ("http://:SECRET@host", "scheme"),
        ("file://host/dir", "slashes"),
        ("redis://:SECRET/@host", "%XX"),
        ("redis://:SECRET@host?size=1", "'size'"),
    ],
)
def test_a_url_that_means_nothing_has_status_2_and_its_password_is_not_shown(
    url: str, part: str, options: tuple[str, ...]
) -> None:
    ran = piped("tier", "check", url, *options)
    assert (2, True, False) == (ran.status, part in ran.err, "SECRET" in ran.out + ran.err), ran
    assert ran.err.startswith("shmstore tier: ")


def test_a_hint_names_what_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryTier()
    memory.fail = TierError("it has ended")
    monkeypatch.setattr(command, "open_tier", lambda _: memory)
    monkeypatch.setattr(command, "_CONNECTS_IN", 0)
    ran = piped("tier", "check", "redis://host:1", *SMALL)
    assert (1, True) == (ran.status, all(part in ran.err for part in ("host", "port", "password", "timeout="))), ran.err


class Wrong(DirectoryTier):
    """Forgets or changes values of 1000 bytes or more."""

    changes = False

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        if len(spans[1]) < 1000 or self.changes:
            super().publish(key, spans)

    def fetch(self, key: str, into: Into) -> bool | None:
        memory: list[memoryview] = []

        def keeping(size: int) -> memoryview | None:
            given = into(size)
            memory.extend([given] if given is not None else [])
            return given

        found = super().fetch(key, keeping)
        if len(memory[1]) >= 1000:
            memory[1][-1] ^= 1
        return found


@pytest.mark.parametrize(("changes", "expected"), [(False, "missing"), (True, "other bytes")])
def test_a_value_that_is_missing_or_another_is_found_out(tmp_path: Path, changes: bool, expected: str) -> None:
    tier = Wrong(tmp_path, timeout=20)
    tier.changes = changes
    figures = command.check(tier, [999, 1000], 2)
    assert 999 == next(figures).nbytes
    with pytest.raises(TierError, match=expected):
        next(figures)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_memory_of_the_values_is_registered_and_must_fit(tmp_path: Path) -> None:
    class Registers(DirectoryTier):
        def register(self, memory: memoryview, path: str) -> None:
            self.same = Path(path).read_bytes() == memory

    tier = Registers(tmp_path, timeout=20)
    assert [1000] == [figure.nbytes for figure in command.check(tier, [1000], 1)]
    assert tier.same
    with raises(StoreSpaceError, hint=["--sizes"]):
        next(command.check(tier, [1 << 44], 1))


def test_a_tier_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "find_spec", lambda _: None)
    ran = piped("tier", "check", "mooncake://127.0.0.1:1")
    assert (1, True) == (ran.status, "shmstore[mooncake]" in ran.err)
