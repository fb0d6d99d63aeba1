"""The password of a tier: it is given by the environment, and no command, log line, error or metric shows it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstore import ObjectStoreWriter
from shmstore.cli.main import main
from shmstore.multimodal import MultiModalCacheConfig
from shmstore.tiers import StoreTier, open_tier
from tests.inspect.cases import piped
from tests.multimodal.helpers import MIB
from tests.support import raises
from tests.tiers.redis_server import RedisServer

SECRET = "PASSWORD-OF-A-TEST"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    made = RedisServer("--requirepass", SECRET)
    yield made
    made.close()


@pytest.fixture
def url(server: RedisServer) -> str:
    return server.url.replace("//", f"//:{SECRET}@") + "?timeout=20"


@pytest.fixture
def given(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSTORE_TIER", url)


@pytest.mark.usefixtures("given")
def test_the_tier_of_the_environment_is_checked_unless_the_command_line_has_one(
    server: RedisServer, url: str, tmp_path: Path
) -> None:
    more = ("--sizes", "1K", "--count", "2", "--json")
    ran = piped("tier", "check", *more)
    assert (0, server.url) == (ran.status, ran.json["url"])
    other = piped("tier", "check", f"file://{tmp_path}", *more)
    assert (0, f"file://{tmp_path}") == (other.status, other.json["url"])
    wrong = piped("tier", "check", url.replace(SECRET, f"{SECRET}-2").replace("=20", "=1"), *more)
    assert (1, True) == (wrong.status, "hint" in wrong.err)
    for each in (ran, other, wrong):
        assert SECRET not in each.out + each.err


@pytest.mark.parametrize("empty", [False, True])
def test_without_both_a_command_says_how_to_give_one(
    empty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHMSTORE_TIER", raising=False)
    if empty:
        monkeypatch.setenv("SHMSTORE_TIER", "")
    assert 2 == main(["tier", "check"])
    assert "SHMSTORE_TIER" in capsys.readouterr().err


def test_neither_logs_nor_metrics_nor_records_have_the_password(
    url: str, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ObjectStoreWriter.create(capacity=MIB, n_readers=1) as writer:
        for wrong in ("", "wrong"):
            tier = StoreTier(writer, open_tier(url.replace(SECRET, SECRET + wrong)))
            for key in "abc":
                tier.fetch(key)
            assert bool(wrong) == bool(tier.stats().errors)
            said = f"{tier.stats()}{tier}{tier._tier}{vars(tier)}"
            tier.close()
            assert SECRET not in said
        prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
        from shmstore.metrics import ShmStoreCollector

        registry = prometheus.CollectorRegistry()
        registry.register(ShmStoreCollector(writer))
        metrics = prometheus.generate_latest(registry).decode()
    assert "shmstore_tier_errors" in metrics
    assert "circuit open" in caplog.text
    for text in (metrics, caplog.text):
        assert SECRET not in text


def test_a_configuration_does_not_show_it() -> None:
    url = f"redis://:{SECRET}@host"
    settings = MultiModalCacheConfig(cache_type="shm", tier_url=url, tier_namespace="m")
    assert SECRET not in f"{settings}{settings.describe()}"
    with raises(ValueError, ["tier_url", "'lru'"]) as caught:
        MultiModalCacheConfig(tier_url=url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("command", [[], ["tier"], ["tier", "check", "file:///a"]])
def test_a_url_in_a_wrong_place_is_not_repeated(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for url in (f"redis://:{SECRET}@host/0", f"redis://user:{SECRET}@host", f"unix:///a?password={SECRET}&db=1"):
        assert 2 == main([*command, url])
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err
        assert "..." in said.err, "the rest is said"
