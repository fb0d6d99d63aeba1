"""`open_tier`: which tier a URL means, what is refused, and that no password is shown."""

import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shmstore.errors import TierError
from shmstore.tiers.directory import DirectoryTier
from shmstore.tiers.urls import open_tier, shown_url
from tests.tiers.contract import fetch, views


class Recorded:
    """Stands for a back end whose package may not be installed; it keeps its arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments
        self.options = options


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("resp", "RespTier"), ("mooncake", "MooncakeTier")):
        stand_in = ModuleType(module)
        setattr(stand_in, name, Recorded)
        monkeypatch.setitem(sys.modules, f"shmstore.tiers.{module}", stand_in)


def made(url: str, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tier: Any = open_tier(url, **options)
    return tier.arguments, tier.options


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_url_is_a_directory(tmp_path: Path, host: str) -> None:
    path = tmp_path / "with @ and #"
    path.mkdir()
    quoted = str(path).replace(" ", "%20").replace("#", "%23")
    tier = open_tier(f"file://{host}{quoted}?timeout=2.5")
    assert isinstance(tier, DirectoryTier)
    tier.publish("key", views([b"value"]))
    assert [b"value"] == fetch(DirectoryTier(path), "key")
    with pytest.raises(TierError, match=r"more than 1e-09 s"):
        open_tier(f"file://{host}{quoted}?timeout=1e-9").publish("key", views([b"value"]))
    open_tier(f"file://{host}{quoted}?timeout=1e-9", timeout=30).publish("key", views([b"value"]))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("url", "arguments", "options"),
    [
        ("redis://host", ("redis://host",), {}),
        ("redis://:a%40b@host:1/2?timeout=0.5", ("redis://:a%40b@host:1/2",), {"timeout": 0.5}),
        (
            "redis://host?db=3&expire=60&connections=8&password=a%26b",
            ("redis://host?db=3&password=a%26b",),
            {"expire": 60, "connections": 8},
        ),
        ("rediss://host?ssl_ca_certs=/a b", ("rediss://host?ssl_ca_certs=%2Fa+b",), {}),
        ("unix:///run/redis.sock?db=1", ("unix:///run/redis.sock?db=1",), {}),
        (
            "mooncake://[::1]:50051?metadata=http://a:8080/metadata&timeout=3",
            ("[::1]:50051",),
            {"metadata": "http://a:8080/metadata", "timeout": 3.0},
        ),
        ("mooncake://host:50051/?protocol=rdma&devices=a,b&host=c", ("host:50051",), None),
    ],
)
def test_options_of_a_url_become_arguments(url: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    expected = {"protocol": "rdma", "devices": "a,b", "host": "c"} if options is None else options
    assert (arguments, expected) == made(url)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("http://host", ["'http'", "file, redis, rediss, unix, mooncake"]),
        ("/directory", ["scheme", "''", "file:///directory"]),
        ("file:///a?capacity=5", ["'capacity'", "options of file:// are timeout"]),
        ("file:///a?timeout=5&timeout=5", ["timeout", "twice"]),
        ("redis://host?expire=5G", ["expire", "a whole number", "'5G'"]),
        ("file:///a?timeout=soon", ["timeout", "a number", "'soon'"]),
        ("file:///a?timeout=nan", ["timeout must be"]),
        ("redis://host?timeout=0", ["timeout must be"]),
        ("mooncake://host:1?timeout=inf", ["timeout must be"]),
        ("file://host/a", ["three slashes"]),
        ("file:a", ["three slashes"]),
        ("redis://host?ssl_ca_certs=a", ["'ssl_ca_certs'", "db, username, password"]),
        ("redis:host", ["redis://host:6379"]),
        ("redis://host:6379/abc", ["number of a database", "redis://host:6379/1"]),
        ("rediss://host/1/2", ["number of a database", "rediss://host:6379/1"]),
        ("redis://host:99999", ["port", "1 to 65535"]),
        ("redis://:a%40b@host:abc", ["port", "1 to 65535"]),
        ("mooncake://host:50051:50051", ["port", "1 to 65535"]),
        ("unix://run", ["unix:///run/redis.sock"]),
        ("mooncake://a:b@host:50051", ["mooncake://host:port"]),
        ("mooncake://host:50051/a", ["mooncake://host:port"]),
        ("mooncake://host:50051?db=1", ["'db'", "metadata, protocol, devices, host, timeout"]),
    ],
)
def test_a_url_that_means_nothing_is_refused_with_what_is_known(url: str, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        open_tier(url)
    assert [] == [name for name in names if name not in str(caught.value)], caught.value


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="url must be a str, not PosixPath"):
        open_tier(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout must be a number of seconds, not str"):
        open_tier(f"file://{tmp_path}", timeout="1")
    with pytest.raises(ValueError, match="'size' is not known; options of file:// are timeout"):
        open_tier(f"file://{tmp_path}", size=5)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "url",
    [
        "redis://:SECRET/more@host:6379",
        "redis://:SECRET#more@host:6379",
        "redis://:more#SECRET@host:6379",
        "redis://user:more@SECRET:6379:6379",
        "redis://:SECRET\N{CARE OF}@host:6379",
        "redis://[:SECRET@host:6379",
        "redis:SECRET@host:6379",
        "user:SECRET@host:6379",
        "http://user:SECRET@host",
        "redis://:SECRET@host:6379?password=SECRET&no-such-option=SECRET",
        "redis://:SECRET@host:6379?db=none",
        "redis://:SECRET@",
        "mooncake://user:SECRET@host:50051",
    ],
)
def test_no_part_of_a_password_is_in_an_error(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        open_tier(url)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert "SECRET" not in shown
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "a traceback would show it"


def test_a_url_is_shown_without_its_secrets() -> None:
    assert "redis://host:6379/2" == shown_url("redis://user:SECRET@host:6379/2?password=SECRET&timeout=1")
    assert "file:///a/@b" == shown_url("file:///a/@b?timeout=5")


@pytest.mark.parametrize(("url", "package"), [("redis://host", "redis"), ("mooncake://host:50051", "mooncake")])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name in ("shmstore.tiers.resp", "shmstore.tiers.mooncake"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install '.*\[{package}\]'"):
        open_tier(url)


def test_a_back_end_is_imported_only_when_it_is_asked_for() -> None:
    program = """
import sys
from shmstore.tiers.urls import open_tier
open_tier("file:///tmp")
print(*sorted(name for name in sys.modules if name.startswith(("redis", "mooncake", "shmstore.tiers."))))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = ran.stdout.split()
    assert "shmstore.tiers.directory" in loaded
    assert not {"redis", "mooncake", "shmstore.tiers.resp", "shmstore.tiers.mooncake"} & set(loaded)
