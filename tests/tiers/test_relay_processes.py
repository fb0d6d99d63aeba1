"""`shmstore relay` as a process, between two stores that stand for two hosts; processes die."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle
from shmstore.cli.command import EXIT_USAGE
from shmstore.cli.main import main
from shmstore.errors import CacheMissError, WriterActiveError
from shmstore.inspect.inspector import StoreInspector
from shmstore.multimodal import MultiModalCacheConfig, ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from shmstore.tiers.relay_client import RelayClient
from tests.fleet.servers import free_port
from tests.multimodal import worker
from tests.multimodal.helpers import MIB, config, shm_sender, update
from tests.multimodal.worker import truth
from tests.support import SHM, Signal, alive, raises, store_name, until

SPAWN = multiprocessing.get_context("spawn")
WORKERS = 2
NAMESPACE = "a model/1"


RELAY = [sys.executable, "-m", "shmstore", "relay", "--namespace", NAMESPACE]
CREATE = ["--create", "--capacity", "1M", "--n-readers", "1"]


class RelayProcess:
    """`shmstore relay` of a store; killed at the end if it lives."""

    def __init__(self, store: str, folder: Path, stack: ExitStack, *options: str) -> None:
        self.socket = str(folder / "socket")
        command = [*RELAY, "--json", "--socket", self.socket]
        command += ["--tier", f"file://{folder}/tier", "--store", store, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(self.kill)
        self.said: dict[str, Any] = {}

    def listening(self) -> "RelayProcess":
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


class Hosts:
    """Host 1 has an API server, and host 2 has a relay that has made its store."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.store = folder, stack, store_name()
        stack.callback(lambda: (SHM / self.store).unlink(missing_ok=True))
        (folder / "tier").mkdir()
        url = f"file://{folder}/tier"
        self.settings: MultiModalCacheConfig = config(
            8 * MIB, 8 * MIB, cache_type="shm", world_size=WORKERS, tier_url=url, tier_namespace=NAMESPACE
        )
        self.relay = self.start()  # meanwhile
        self.sender: ShmObjectStoreSenderCache[Any, Any] = shm_sender(self.settings)
        stack.callback(self.sender.close)
        self.relay.listening()

    def start(self) -> RelayProcess:
        sizes = ("--capacity", "8M", "--n-readers", str(WORKERS))
        return RelayProcess(self.store, self.folder, self.stack, "--create", *sizes)

    @property
    def handle(self) -> StoreHandle:
        return StoreHandle(**self.relay.said["handle"])

    def send(self, *mm_hashes: str) -> list[Any]:
        """Do what the API server of host 1 does for these items, and return what it sends."""
        outputs = self.sender.get_and_update([(truth(name), [update(name)]) for name in mm_hashes], mm_hashes)
        return [sent for sent, _ in outputs]

    def worker(self, rank: int = 0, wait: float = 10.0) -> ShmObjectStoreReceiverCache[Any]:
        """Return the cache of a worker of host 2, in this process."""
        reader = ObjectStoreReader.attach(self.handle, rank)
        cache: ShmObjectStoreReceiverCache[Any] = ShmObjectStoreReceiverCache(
            reader, relay=RelayClient(self.relay.socket, wait=wait)
        )
        self.stack.callback(cache.close)
        return cache

    def leases(self) -> int:
        with StoreInspector.open(self.store) as inspector:
            return len(inspector.leases())


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(tmp_path, stack)


def test_the_workers_of_a_host_fetch_each_item_of_another_host_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{seed}:{size}" for seed, size in enumerate([0, 100, 5_000, 60_000, 600_000])]
    monkeypatch.setenv("SHMSTORE_RELAY", hosts.relay.socket)
    pipes = []
    for rank in range(WORKERS):
        mine, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=worker.main, args=(theirs, hosts.settings, rank, hosts.handle))
        process.start()
        hosts.stack.callback(process.join)
        hosts.stack.callback(mine.close)
        theirs.close()
        pipes.append(mine)
    assert [pipe.recv() for pipe in pipes] == ["attached"] * WORKERS
    for number, batch in enumerate([names[:1], names, names]):
        sent = hosts.send(*batch)
        assert all(isinstance(ref, ObjectRef) for ref in sent)
        for pipe in pipes:
            pipe.send((number, batch, sent))
        assert [pipe.recv() for pipe in pipes] == [(number, True)] * WORKERS
    with StoreInspector.open(hosts.store) as inspector:
        assert inspector.facts().puts == len(names)
    for pipe in pipes:
        pipe.send(None)
        assert pipe.recv() == "done"
    assert hosts.leases() == 0
    before = hosts.handle
    assert hosts.relay.end() == 0
    assert not os.path.exists(hosts.relay.socket)
    hosts.relay = hosts.start().listening()
    assert before == hosts.handle  # the store stays, so its workers go on after a restart


def test_a_worker_that_is_killed_between_answer_and_read_leaves_no_lease(hosts: Hosts) -> None:
    hosts.send("1:5000")

    def work(fetched: Signal) -> None:
        with RelayClient(hosts.relay.socket).fetching() as conversation:
            conversation.fetch("1:5000")
            fetched.send()
            signal.pause()

    with alive(work):
        assert hosts.leases() == 1
    until(lambda: hosts.leases() == 0)


def test_a_relay_that_is_killed_costs_a_quick_miss_and_its_successor_goes_on(hosts: Hosts) -> None:
    sent = hosts.send("1:5000", "2:5000")
    cache = hosts.worker()
    assert cache.get_and_update_item(sent[0], "1:5000") == truth("1:5000")
    until(lambda: hosts.leases() == 0)
    reading = RelayClient(hosts.relay.socket)
    with reading.fetching() as conversation:
        conversation.fetch("1:5000")
        hosts.relay.kill()
    assert hosts.leases() == 1  # of the dead relay
    begin = time.monotonic()
    with raises(CacheMissError, ["relay", "2:5000"], ["shmstore relay"]):
        cache.get_and_update(sent, ["1:5000", "2:5000"])
    assert time.monotonic() - begin < 9  # the wait is 10 s
    hosts.relay = hosts.start().listening()  # its predecessor's socket is still there
    assert cache.get_and_update(sent, ["1:5000", "2:5000"]) == [truth("1:5000"), truth("2:5000")]
    until(lambda: hosts.leases() == 0)
    with StoreInspector.open(hosts.store) as inspector:
        assert inspector.facts().puts == 2  # the first one came along
    assert hosts.relay.end() == 0


def test_a_stopped_relay_costs_a_miss_after_the_wait(hosts: Hosts) -> None:
    sent = hosts.send("1:5000")
    cache = hosts.worker(wait=0.1)
    os.kill(hosts.relay.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with raises(CacheMissError, ["timed out"]):
        cache.get_and_update(sent * 3, ["1:5000"] * 3)
    assert 2 < time.monotonic() - begin < 6  # and not three times as long
    os.kill(hosts.relay.process.pid, signal.SIGCONT)
    assert cache.get_and_update(sent, ["1:5000"]) == [truth("1:5000")]


def test_a_relay_joins_a_store_finds_what_its_host_has_and_leaves_it_there(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    with ExitStack() as stack:
        name = store_name()
        writer = stack.enter_context(ObjectStoreWriter.create(name, capacity=MIB, n_readers=1, n_writers=2))
        writer.put("own", "value")  # of this host's API server; it is in no tier
        relay = RelayProcess(name, tmp_path, stack).listening()
        reader = stack.enter_context(ObjectStoreReader.attach(writer.handle, 0))
        client = RelayClient(relay.socket, wait=0)
        with client.fetching() as conversation:
            assert reader.get(conversation.fetch("own")) == "value"
            with StoreInspector.open(name) as inspector:
                (lease,) = (lease for lease in inspector.leases() if lease.held)
            assert (lease.writer, lease.adopted_from) == (1, 0)
        second = subprocess.run(
            [*RELAY, "--tier", f"file://{tmp_path}", "--store", name], capture_output=True, text=True
        )
        assert second.returncode == 1
        assert "relay=True" in second.stderr
        assert "another relay" in second.stderr
        assert relay.end() == 0
        assert (SHM / name).exists()
        writer.check_valid()
        with ObjectStoreWriter.join(name) as next_one:  # the arena is free
            assert next_one.index == 1
            next_one.close(unlink=False)


def test_a_configuration_makes_room_for_the_relay_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    url, name = f"file://{tmp_path}/tier", store_name()
    more = {"shm_name": name, "tier_url": url, "tier_namespace": NAMESPACE, "relay": True}
    settings = config(2 * MIB, 2 * MIB, cache_type="shm", **more)
    with ExitStack() as stack:
        stack.callback(lambda: (SHM / name).unlink(missing_ok=True))
        sender = stack.enter_context(shm_sender(settings))
        assert (2, 2 * MIB) == (sender.writer.n_writers, sender.writer.stats().capacity)
        relay = RelayProcess(name, tmp_path, stack).listening()
        with raises(WriterActiveError, [name], ["api_process_count", "relay"]):
            shm_sender(settings)
        assert relay.end() == 0
        sender.close()
        alone = replace(settings, relay=False)
        stack.enter_context(shm_sender(alone))
        refused = subprocess.run([*RELAY, "--tier", url, "--store", name], capture_output=True, text=True)
        assert 1 == refused.returncode
        (line,) = refused.stderr.splitlines()
        assert name in line
        assert "set relay=True in the configuration" in line


def test_a_relay_listens_before_its_tier_answers_and_is_the_only_one_of_its_store(tmp_path: Path) -> None:
    name = store_name()
    command = [*RELAY, "--tier", f"redis://127.0.0.1:{free_port()}", "--store", name]
    with ExitStack() as stack:
        relay = subprocess.Popen(
            [*command, *CREATE, "--socket", f"{tmp_path}/one"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(relay.communicate)
        stack.callback(relay.kill)
        assert relay.stdout is not None
        assert f" {tmp_path}/one " in relay.stdout.readline()
        second = subprocess.run([*command, *CREATE, "--socket", f"{tmp_path}/two"], capture_output=True, text=True)
        assert (1, True) == (second.returncode, "end the other relay" in second.stderr)
        relay.terminate()
        assert "does not answer yet" in relay.communicate()[1]
        assert relay.returncode == 0
        ObjectStoreWriter.unlink(name)
    for some in (CREATE[:1], CREATE[1:3], CREATE[1:]):
        assert main([*command[3:], *some]) == EXIT_USAGE


@pytest.mark.parametrize("kind", ["no folder", "a file"])
def test_a_socket_that_cannot_be_made_is_refused_before_a_store_is_made(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, path = store_name(), tmp_path / "none" / "socket" if kind == "no folder" else tmp_path / "taken"
    if kind == "a file":
        path.touch()
    assert main([*RELAY[3:], "--tier", f"file://{tmp_path}", "--store", name, "--socket", str(path), *CREATE]) == 1
    assert (True, True) == (str(path) in (said := capfd.readouterr().err), "pass a" in said)
    assert not (SHM / name).exists()


def test_a_relay_joins_or_makes_the_store_in_its_folder(tmp_path: Path) -> None:
    name, folder = store_name(), SHM / store_name()
    (tmp_path / "tier").mkdir()
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(folder.rmdir)
        with ObjectStoreWriter.create(name, capacity=MIB, n_readers=1, n_writers=2, dir=folder) as writer:
            relay = RelayProcess(name, tmp_path, stack, "--dir", str(folder)).listening()
            assert asdict(writer.handle) == relay.said["handle"]
            assert 0 == relay.end()
        relay = RelayProcess(name, tmp_path, stack, "--dir", str(folder), *CREATE).listening()
        assert 0 == relay.end()
        ObjectStoreWriter.unlink(name, dir=folder)
