"""A relay in a thread: what it fetches, what it keeps for how long, and what it refuses."""

import os
import resource
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.errors import CacheMissError, StaleRefError
from shmstore.multimodal import ShmObjectStoreReceiverCache
from shmstore.tiers import StoreTier
from shmstore.tiers.relay import Relay
from shmstore.tiers.relay_client import MAX_REQUEST, RelayClient, relay_path, request
from tests.multimodal.helpers import features, three_tensors
from tests.support import Child, Signal, crowd, raises, until
from tests.tiers.memory import MemoryTier, late

KEY = "photograph"
SIZE = 40_000


class Host:
    """A store with a relay in a thread, and what its workers have."""

    def __init__(self, memory: MemoryTier, path: Path) -> None:
        self.writer = ObjectStoreWriter.create(capacity=1 << 20, n_readers=1)
        self.reader = ObjectStoreReader.attach(self.writer.handle, 0)
        self.tier = StoreTier(self.writer, memory)
        self.relay = Relay(path)
        self.thread = threading.Thread(target=self.relay.serve, args=(self.writer, self.tier))
        self.thread.start()

    def client(self, wait: float = 10.0) -> RelayClient:
        return RelayClient(self.relay.path, wait=wait)

    def fetch(self, key: str = KEY, wait: float = 10.0) -> Any:
        with self.client(wait).fetching() as conversation:
            return self.reader.get(conversation.fetch(key), copy=True)

    def leases(self) -> int:
        return self.writer.stats().open_leases

    def end(self) -> None:
        self.relay.stop()
        self.thread.join(10)

    def close(self) -> None:
        self.end()
        self.tier.close()
        self.reader.close()
        self.writer.check_valid()
        self.writer.close()


@pytest.fixture
def memory() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def host(memory: MemoryTier, tmp_path: Path) -> Iterator[Host]:
    made = Host(memory, tmp_path / "relay")
    yield made
    made.close()


class OtherHost:
    """Another host, which publishes what it stores."""

    def __init__(self, memory: MemoryTier) -> None:
        self.writer = ObjectStoreWriter.create(capacity=1 << 20, n_readers=1)
        self.tier = StoreTier(self.writer, memory)

    def put(self, key: str = KEY, value: Any = None, publish: bool = True, namespace: str | None = None) -> ObjectRef:
        ref = self.writer.put(key, three_tensors(SIZE) if value is None else value, namespace=namespace)
        if publish:
            self.publish(key, namespace)
        return ref

    def publish(self, key: str = KEY, namespace: str | None = None) -> None:
        self.tier.publish(key, namespace=namespace)
        assert self.tier.flush(10)


@pytest.fixture
def other(memory: MemoryTier) -> Iterator[OtherHost]:
    made = OtherHost(memory)
    yield made
    made.tier.close()
    made.writer.close()


def test_a_key_becomes_a_reference_of_this_host_which_stays_until_the_block_ends(host: Host, other: OtherHost) -> None:
    other.put()
    with host.client().fetching() as conversation:
        ref = conversation.fetch(KEY)
        assert ref.store_id == host.writer.handle.store_id
        assert host.reader.get(ref, copy=True) == three_tensors(SIZE)
        assert ref == conversation.fetch(KEY), "a worker that repeats itself takes one lease"
        assert host.leases() == 1
        crowd(host.writer)
        assert host.reader.get(ref, copy=True) == three_tensors(SIZE)  # may be read again, as in a batch
        assert host.leases() == 1
    until(lambda: host.leases() == 0)


@pytest.mark.parametrize("namespace", [None, "a model/1", "x" * 255])
def test_keys_of_namespaces_are_fetched_too(host: Host, other: OtherHost, namespace: str | None) -> None:
    key = "é" * 16_000  # the longest ones
    other.put(key, "value", namespace=namespace)
    with host.client().fetching() as conversation:
        assert host.reader.get(conversation.fetch(key, namespace=namespace)) == "value"


def test_an_interrupted_request_leaves_no_answer_for_the_next(host: Host, other: OtherHost) -> None:
    other.put()
    other.put("other", "value")
    with host.client().fetching() as conversation:
        conversation.fetch("other")

        class Interrupted(socket.socket):
            def recv(self, *arguments: Any) -> bytes:
                raise KeyboardInterrupt

        assert conversation._connection is not None
        conversation._connection = Interrupted(fileno=conversation._connection.detach())
        with pytest.raises(KeyboardInterrupt):
            conversation.fetch(KEY)
        assert host.reader.get(conversation.fetch("other")) == "value"
    until(lambda: host.leases() == 0)


def test_it_waits_for_an_object_that_is_published_late(host: Host, other: OtherHost, memory: MemoryTier) -> None:
    other.put(publish=False)
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(host.fetch()))
    worker.start()
    until(lambda: memory.calls.count("fetch") >= 2)
    other.publish()
    worker.join(10)
    assert found == [three_tensors(SIZE)]


def test_what_does_not_come_is_a_miss_after_the_wait(host: Host) -> None:
    begin = time.monotonic()
    with raises(CacheMissError, [KEY, "relay"], ["publishes", "process"]) as caught:
        host.fetch(wait=0.3)
    assert 0.3 <= time.monotonic() - begin < 10
    assert caught.value.mm_hashes == (KEY,)
    assert host.leases() == 0


def test_the_wait_is_for_a_block_as_a_whole(host: Host, other: OtherHost) -> None:
    other.put()
    begin = time.monotonic()
    with host.client(0.3).fetching() as conversation:
        for number in range(20):
            with pytest.raises(CacheMissError):
                conversation.fetch(f"missing-{number}")
        conversation.fetch(KEY)  # what is there is fetched all the same
    assert time.monotonic() - begin < 5  # and not 20 times the wait


def test_a_tier_that_is_down_is_a_miss_at_once(host: Host, memory: MemoryTier) -> None:
    memory.fail = late()
    begin = time.monotonic()
    with raises(CacheMissError, ["the tier does not answer"]):
        host.fetch(wait=60)
    assert time.monotonic() - begin < 10


def test_an_object_that_is_evicted_before_it_is_handed_out_is_fetched_again(
    host: Host, other: OtherHost, memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.put()
    fetch = host.tier.fetch

    def evicted(key: str, **more: Any) -> bool:
        found = fetch(key, **more)
        monkeypatch.undo()
        host.writer.delete(key)
        return found

    monkeypatch.setattr(host.tier, "fetch", evicted)
    assert host.fetch() == three_tensors(SIZE)
    assert memory.calls.count("fetch") == 2


def test_an_object_comes_when_the_store_has_room_for_it(host: Host, other: OtherHost, memory: MemoryTier) -> None:
    other.put()
    full = host.writer.put("large", torch.zeros(1_030_000, dtype=torch.uint8), hold=True)
    with raises(CacheMissError, ["room"]):
        host.fetch(wait=0.1)
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(host.fetch()))
    before = memory.calls.count("fetch")
    worker.start()
    until(lambda: memory.calls.count("fetch") > before)
    host.writer.cancel(full)
    worker.join(10)
    assert found == [three_tensors(SIZE)]


def test_an_object_comes_when_a_lease_is_free(host: Host, other: OtherHost) -> None:
    other.put()
    host.writer.put("own", 1)
    for _ in range(host.writer.stats().max_leases - 1):
        host.writer.get_cached("own")
    with raises(CacheMissError, ["room"]):
        host.fetch(wait=0.1)
    host.writer.cancel_all()
    assert host.fetch() == three_tensors(SIZE)


def connect(host: Host) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(host.relay.path)
    return connection


def test_a_worker_that_goes_while_it_waits_is_waited_for_no_longer(host: Host, memory: MemoryTier) -> None:
    with connect(host) as connection:
        connection.send(request(KEY, None, 3600))
        until(lambda: memory.calls.count("fetch") >= 2)
    until(lambda: not host.relay._connections)


ASK = request(KEY, None, 1.0)


@pytest.mark.parametrize(
    "message",
    [
        b"?",
        ASK[:-1],
        ASK + b"k" * MAX_REQUEST,
        b"\0" * 100,
        *map(msgpack.packb, (5, [KEY], ["", None, 1.0], [5, None, 1.0], [KEY, 5, 1.0], [KEY, None, "1"])),
        *map(msgpack.packb, ([KEY, None, -1.0], [KEY, None, float("nan")], [b"\xff", None, 1.0])),
    ],
)
def test_what_is_not_a_request_is_refused_and_ends_the_connection(host: Host, other: OtherHost, message: bytes) -> None:
    other.put()
    with connect(host) as connection:
        connection.send(ASK)
        assert connection.recv(100)[:1] == b"+"
        connection.send(message)
        answer = connection.recv(4096)
        assert answer[:1] == b"-"
        assert connection.recv(100) == b""
    until(lambda: host.leases() == 0)
    assert host.fetch() == three_tensors(SIZE)


def test_the_socket_is_for_this_user_alone_whatever_the_umask(memory: MemoryTier, host: Host) -> None:
    assert stat.S_IMODE(os.stat(host.relay.path).st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_relay_is_not_asked() -> None:
    folder = tempfile.TemporaryDirectory()
    os.chmod(folder.name, 0o777)
    path = f"{folder.name}/relay"
    ready = Signal()

    def listen() -> bytes:
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        ready.send()
        return listener.accept()[0].recv(100)

    child = Child(listen)
    ready.wait()
    with (
        raises(CacheMissError, ["another user's"]),
        RelayClient(path).fetching() as conversation,
    ):
        conversation.fetch(KEY)
    assert child.join() == b""
    ready.close()
    folder.cleanup()


def test_its_end_ends_connections_leases_and_socket(host: Host, other: OtherHost, memory: MemoryTier) -> None:
    other.put()
    with connect(host) as reading, connect(host) as waiting:
        reading.send(ASK)
        assert reading.recv(100)[:1] == b"+"
        waiting.send(request("missing", None, 3600))
        until(lambda: memory.calls.count("fetch") >= 2)
        host.end()
        assert reading.recv(100) == b""
    assert host.leases() == 0
    assert not host.relay._connections
    assert not os.path.exists(host.relay.path)
    with raises(CacheMissError, ["does not answer"], ["shmstore relay"]):
        host.fetch()


def test_a_worker_that_asks_for_what_a_closed_store_had_is_told_at_once(
    memory: MemoryTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(memory, tmp_path / "relay")
    host.reader.close()
    host.writer.close()
    with raises(CacheMissError, ["it has ended the connection"]):
        host.fetch(wait=3600)
    assert "gets no answer" in caplog.text
    host.end()
    host.tier.close()


@pytest.mark.parametrize("kind", ["file", "folder", "stream", "full"])
def test_what_has_the_path_stays_and_the_error_says_what_to_do(host: Host, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "taken"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "stream" else socket.SOCK_SEQPACKET) as other:
        if kind == "file":
            path.touch()
        elif kind == "folder":
            path.mkdir()
        else:
            other.bind(str(path))
            other.listen(0)
        with socket.socket(socket.AF_UNIX, other.type) as filler:
            if kind == "full":
                filler.connect(str(path))
            before = path.lstat()
            with pytest.raises(FileExistsError, match=r"another relay or file.*pass another path") as caught:
                Relay(path)
        assert caught.value.filename == str(path)
        assert path.lstat() == before


def test_it_survives_that_no_file_descriptor_is_free(
    host: Host, other: OtherHost, caplog: pytest.LogCaptureFixture
) -> None:
    other.put()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (mine.fileno() + 1, before[1]))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        try:
            mine.connect(host.relay.path)
            until(lambda: "must wait" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        mine.send(ASK)
        assert mine.recv(100)[:1] == b"+"


def test_it_survives_that_no_thread_can_be_started(
    host: Host, other: OtherHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    other.put()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with raises(CacheMissError, ["does not answer"]):
            host.fetch()
    assert "can't start new thread" in caplog.text
    assert not host.relay._connections
    assert host.fetch() == three_tensors(SIZE)


def test_a_relay_whose_backlog_is_full_is_tried_again_within_the_wait(
    host: Host, other: OtherHost, tmp_path: Path
) -> None:
    other.put()
    relay = Relay(tmp_path / "busy")
    relay._listener.listen(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as filler:
        filler.connect(relay.path)
        begin = time.monotonic()
        with raises(CacheMissError, ["does not answer"]), RelayClient(relay.path, wait=0.2).fetching() as conversation:
            conversation.fetch(KEY)
        assert 0.2 <= time.monotonic() - begin < 10
        serving = threading.Timer(0.2, relay.serve, (host.writer, host.tier))
        serving.start()
        with RelayClient(relay.path, wait=10).fetching() as conversation:
            assert host.reader.get(conversation.fetch(KEY), copy=True) == three_tensors(SIZE)
    relay.stop()
    serving.join(10)


# ---- a worker's cache


def worker(host: Host, **more: Any) -> Any:
    more.setdefault("relay", host.relay.path)
    return ShmObjectStoreReceiverCache(host.reader, **more)


@pytest.mark.parametrize("policy", ["views", "copy"])
def test_a_workers_cache_reads_references_of_another_host(host: Host, other: OtherHost, policy: str) -> None:
    names = ["one", "two"]
    refs = [other.put(name) for name in names]
    cache = worker(host, policy=policy)
    for _ in range(2):
        batch = features(names, refs)
        assert [one.data for one in cache.get_and_update_features(batch)] == [three_tensors(SIZE)] * 2
        assert cache.get_and_update_item(refs[0], "one") == three_tensors(SIZE)
    del batch
    until(lambda: host.leases() == 0)
    assert host.tier.stats().hits == 2
    cache.close()


def test_a_batch_may_mix_hosts_and_its_error_names_all_that_is_missing(host: Host, other: OtherHost) -> None:
    cache = worker(host, relay=host.client(0.2))
    own, inline = host.writer.put("own", three_tensors(SIZE)), three_tensors(SIZE)
    foreign = other.put("foreign")
    sent = [own, foreign, inline, None, foreign]
    names = ["own", "foreign", "inline", "foreign", "foreign"]
    assert cache.get_and_update(sent, names) == [three_tensors(SIZE)] * 5
    stale = host.writer.put("stale", three_tensors(SIZE))
    host.reader.release(stale)
    crowd(host.writer)
    gone = [other.put("gone", publish=False), other.put("gone too", publish=False)]
    with raises(CacheMissError, ["gone", "gone too", "stale", "relay"], ["publishes"]) as caught:
        cache.get_and_update([foreign, gone[0], stale, gone[1]], ["foreign", "gone", "stale", "gone too"])
    assert caught.value.mm_hashes == ("gone", "stale", "gone too")
    with pytest.raises(CacheMissError) as caught:
        cache.get_and_update([foreign, stale], ["foreign", "stale"])
    assert caught.value.mm_hashes == ("stale",)
    until(lambda: host.leases() == 0)
    cache.close()


def test_references_of_the_own_store_do_not_touch_the_relay(host: Host, tmp_path: Path) -> None:
    cache = worker(host, relay=tmp_path / "no relay")
    ref = host.writer.put(KEY, three_tensors(SIZE), hold=True)
    assert cache.get_and_update([ref, ref], [KEY, KEY]) == [three_tensors(SIZE)] * 2
    assert cache.get_and_update_item(ref, KEY) == three_tensors(SIZE)
    host.writer.cancel(ref)
    crowd(host.writer)
    with pytest.raises(CacheMissError) as caught:
        cache.get_and_update_item(ref, KEY)
    assert "relay" not in str(caught.value)
    assert not host.relay._connections


def test_release_ignores_references_of_another_host(host: Host, other: OtherHost) -> None:
    foreign, own = other.put(), host.writer.put("own", 1)
    assert worker(host).release([foreign, own, None]) == 1
    with pytest.raises(StaleRefError):
        worker(host, relay=None).release([foreign])


# ---- arguments


def test_a_path_must_fit_a_socket(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, error in ((5, TypeError), ("", ValueError), ("x" * 108, ValueError)):
        with pytest.raises(error):
            RelayClient(path)  # type: ignore[arg-type]
        with pytest.raises(error):
            Relay(path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wait"):
        RelayClient("x", wait=-1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert relay_path("engine") == "/run/user/1/shmstore-relay-engine.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert relay_path("engine") == "/tmp/shmstore-relay-engine.sock"
    with pytest.raises(ValueError, match="107"):
        relay_path("x" * 100)
