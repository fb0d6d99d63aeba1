"""`MooncakeTier` against a real master and a real node."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path

import pytest

from shmstore.errors import TierError, TierFullError
from shmstore.tiers.mooncake import INLINE, LANES, STAGING, MooncakeTier
from tests.support import SHM, children, store_name
from tests.tiers.contract import MIB, Contract, fetch, random_bytes, values_of, views
from tests.tiers.servers import LOOPBACK, MooncakeServers, end, free_port, missing_for_mooncake

if problem := missing_for_mooncake():
    pytest.skip(problem, allow_module_level=True)  # one line for all of them

PATIENT = 20.0
"""A time-out that only a hang exceeds."""
TIMEOUT = 1.0
LATE = TIMEOUT + 3.0
"""When a call with TIMEOUT must have returned on a busy machine."""


def connected(tier: MooncakeTier) -> MooncakeTier:
    """Wait until the tier's client has connected to a master that has a node."""
    works_again(tier, store_name())
    return tier


def works_again(tier: MooncakeTier, key: str) -> None:
    """Wait until a publish and a fetch of its key succeed."""
    value = values_of([10, INLINE + 1])
    deadline = time.monotonic() + 30
    while True:
        try:
            tier.publish(key, views(value))
            if value == fetch(tier, key):
                return
        except TierError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def in_time(call: Callable[[], object]) -> TierError | None:
    """Return the TierError of a call, None if it has none; it must return in time."""
    begun = time.monotonic()
    try:
        call()
    except TierError as error:
        return error
    finally:
        assert time.monotonic() - begun < LATE
    return None


class Arena:
    """A mapping of a file in /dev/shm, as a store has one."""

    def __init__(self, size: int) -> None:
        self.path = SHM / store_name()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(descriptor, size)
        self.view = memoryview(mmap(descriptor, size))
        os.close(descriptor)

    def filled(self, at: int, value: bytes) -> memoryview:
        self.view[at : at + len(value)] = value
        return self.view[at : at + len(value)].toreadonly()

    def close(self) -> None:
        self.path.unlink()


@pytest.fixture(scope="module")
def servers() -> Iterator[MooncakeServers]:
    made = MooncakeServers(LOOPBACK, 512 * MIB)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_tier(servers: MooncakeServers) -> Iterator[MooncakeTier]:
    made = connected(MooncakeTier(servers.address, timeout=PATIENT))
    yield made
    made.close()


@pytest.fixture
def make() -> Iterator[Callable[..., MooncakeTier]]:
    """Makes tiers that are closed at the end."""
    made: list[MooncakeTier] = []

    def tier(address: str, timeout: float = TIMEOUT) -> MooncakeTier:
        made.append(MooncakeTier(address, timeout=timeout))
        return made[-1]

    yield tier
    for one in made:
        one.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(256 * MIB)
    yield made
    made.close()


@pytest.fixture
def few() -> Iterator[MooncakeServers]:
    """A master and a node of 32 MiB for one test, which may kill them."""
    made = MooncakeServers(LOOPBACK, 32 * MIB)
    yield made
    made.close()


@pytest.fixture
def key() -> str:
    return store_name()


class TestContract(Contract):
    @pytest.fixture
    def tier(self, shared_tier: MooncakeTier) -> MooncakeTier:
        return shared_tier

    @pytest.fixture
    def own(self, servers: MooncakeServers, make: Callable[..., MooncakeTier]) -> MooncakeTier:
        return connected(make(servers.address, PATIENT))

    def test_a_closed_tier_refuses_every_call_but_close(self, own: MooncakeTier, key: str) -> None:  # type: ignore[override]
        super().test_a_closed_tier_refuses_every_call_but_close(own, key)


# ---- memory


@pytest.mark.parametrize("sizes", [[300, 6 * MIB], [0, STAGING + 1], [2 * MIB, 0, INLINE + 1]], ids=str)
def test_two_hosts_move_spans_from_and_into_their_arenas(
    servers: MooncakeServers, make: Callable[..., MooncakeTier], arena: Arena, key: str, sizes: list[int]
) -> None:
    one, other = make(servers.address, PATIENT), make(servers.address, PATIENT)
    for tier in (one, other):
        tier.register(arena.view, arena.path)
    values = values_of(sizes)
    starts = [n * 65 * MIB + 64 for n in range(len(sizes))]
    spans = [arena.filled(at, value) for at, value in zip(starts, values, strict=True)]
    connected(other)
    one.publish(key, spans)
    arena.view[: 200 * MIB : MIB] = bytes(200)
    targets = iter(starts)
    assert other.fetch(key, lambda size: (lambda at: arena.view[at : at + size])(next(targets)))
    assert values == spans


def test_a_span_outside_of_registered_memory_is_of_up_to_16_mib(
    servers: MooncakeServers, make: Callable[..., MooncakeTier], shared_tier: MooncakeTier, arena: Arena, key: str
) -> None:
    other = make(servers.address, PATIENT)
    other.register(arena.view, arena.path)
    tier = shared_tier
    value = values_of([STAGING])
    tier.publish(key, views(value))
    assert value == fetch(tier, key)
    with pytest.raises(TierError, match="register its memory"):
        tier.publish(key, [memoryview(bytes(STAGING + 1))])
    connected(other).publish(key, [arena.view[: STAGING + 1]])
    with pytest.raises(TierError, match="register its memory"):
        fetch(tier, key)
    assert [True] == tier.has([key])


def test_a_value_that_is_not_ours_or_not_whole_is_a_miss(shared_tier: MooncakeTier, key: str) -> None:
    tier = shared_tier
    tier.publish(key, views(values_of([INLINE + 1, 5])))
    change = changing(tier)
    change("upsert", f"{key}/0", INLINE)
    said = partial(tier.fetch, key, lambda size: memoryview(bytearray(size)))
    assert said() is None, "a shorter span than the head says"
    change("upsert", f"{key}/0", INLINE + 2)
    assert said() is False, "a longer span, of a later publish"
    change("remove", f"{key}/0", 0)
    assert said() is False, "no span any more"
    for length in (1, 3, 4, 11, 100):
        change("upsert", f"{key}/head", length)
        assert said() is None, "no head of ours"


def changing(tier: MooncakeTier) -> Callable[[str, str, int], None]:
    """Return what changes keys of Mooncake itself."""

    def change(what: str, name: str, length: int) -> None:
        with tier._lane() as lane:
            if what == "remove":
                lane.remove([name])
            else:
                lane.put(name, memoryview(random_bytes(length, length)))

    return change


def test_remove_removes_the_large_spans_too(shared_tier: MooncakeTier, key: str) -> None:
    shared_tier.publish(key, views(values_of([5, INLINE + 1, 2 * INLINE])))
    names = [f"{key}/{name}" for name in ("head", "1", "2")]

    def there() -> list[int]:
        with shared_tier._lane() as lane:
            codes: list[int] = lane.ask("batch_is_exist", names)
        return codes

    assert [1, 1, 1] == there()
    shared_tier.remove([key])
    assert [0, 0, 0] == there()


# ---- trouble


def test_a_store_without_room_is_full_and_goes_on(
    few: MooncakeServers, make: Callable[..., MooncakeTier], arena: Arena, key: str
) -> None:
    tier = make(few.address, PATIENT)
    tier.register(arena.view, arena.path)
    connected(tier)
    with pytest.raises(TierFullError):
        tier.publish(key, [arena.view[: 40 * MIB]])
    assert fetch(tier, key) is None
    works_again(tier, key)


def test_a_killed_node_is_a_miss_or_an_error_and_another_one_takes_over(
    few: MooncakeServers, make: Callable[..., MooncakeTier], key: str
) -> None:
    tier = make(few.address)
    works_again(tier, key)
    end(few.node)
    in_time(lambda: pytest.fail("the value is gone") if fetch(tier, key) else None)
    in_time(lambda: tier.publish(key, views(values_of([5, MIB]))))
    in_time(lambda: tier.has([key]))
    few.start_node()
    works_again(tier, key)


def test_a_killed_master_is_an_error_and_another_one_knows_nothing(
    few: MooncakeServers, make: Callable[..., MooncakeTier], key: str
) -> None:
    tier = make(few.address)
    works_again(tier, key)
    end(few.master)
    for call in (
        lambda: fetch(tier, key),
        lambda: tier.publish(key, views(values_of([5, MIB]))),
    ):
        assert in_time(call) is not None
    few.start_master()
    works_again(tier, store_name())
    assert [False] == tier.has([key])


@pytest.mark.slow  # its time-outs are Mooncake's, and a busy machine exceeds them
@pytest.mark.parametrize("who", ["node", "master"])
def test_a_stopped_server_is_late_and_the_memory_of_late_calls_is_free(
    servers: MooncakeServers,
    make: Callable[..., MooncakeTier],
    shared_tier: MooncakeTier,
    arena: Arena,
    key: str,
    who: str,
) -> None:
    tier = make(servers.address)
    tier.register(arena.view, arena.path)
    connected(tier)
    size = 8 * MIB
    source = arena.filled(0, random_bytes(1, size))
    target = arena.view[size : 2 * size]
    shared_tier.publish(key, [memoryview(b"a"), source])
    process = getattr(servers, who)

    def into(size: int) -> memoryview:
        if size == 1:
            return memoryview(bytearray(1))
        process.send_signal(signal.SIGSTOP)  # what is late is the read into `target`
        return target

    try:
        assert in_time(lambda: tier.fetch(key, into)) is not None
        target[:] = bytes(size)
        assert in_time(lambda: tier.publish(key, [memoryview(b"b"), source])) is not None
        assert who == "node" or in_time(lambda: tier.has([key])) is not None
    finally:
        process.send_signal(signal.SIGCONT)
    works_again(tier, store_name())
    assert bytes(size) == target, "nothing wrote after the call had returned"


def test_a_master_that_never_was_is_an_error_in_time(make: Callable[..., MooncakeTier], key: str) -> None:
    tier = make(f"127.0.0.1:{free_port()}", 0.3)
    for _ in range(3):
        assert in_time(lambda: tier.has([key])) is not None
    make("no-such-host.invalid:50051")
    assert in_time(lambda: tier.has([key])) is not None


def test_a_client_that_ends_is_an_error_and_the_next_call_starts_another(
    servers: MooncakeServers, make: Callable[..., MooncakeTier], key: str
) -> None:
    before = children()
    tier = connected(make(servers.address, PATIENT))
    (client,) = children() - before
    os.kill(client, signal.SIGKILL)
    with pytest.raises(TierError, match="has ended"):
        tier.has([key])
    works_again(tier, key)
    assert client not in children()


@pytest.mark.slow  # as above
def test_a_late_call_ends_those_beside_it_and_no_call_waits_for_a_lane_too_long(
    servers: MooncakeServers, make: Callable[..., MooncakeTier], shared_tier: MooncakeTier, key: str
) -> None:
    tier = connected(make(servers.address))
    shared_tier.publish(key, views(values_of([5, MIB])))
    servers.node.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(3 * LANES) as pool:
            errors = list(pool.map(lambda _: in_time(lambda: fetch(tier, key)), range(3 * LANES)))
    finally:
        servers.node.send_signal(signal.SIGCONT)
    assert None not in errors
    works_again(tier, key)


@pytest.mark.usefixtures("shared_tier")  # so the servers work
@pytest.mark.parametrize("state", ["idle", "in a call", "with a child that lives on"])
def test_the_client_ends_with_a_process_that_is_killed(servers: MooncakeServers, state: str) -> None:
    busy = state == "in a call"
    program = (  # without torch, which takes seconds
        "import os, signal, sys; from pathlib import Path; from shmstore.tiers.mooncake import MooncakeTier;"
        f"tier = MooncakeTier(sys.argv[1], timeout={PATIENT}); tier.has(['a']);"
        "clients = [path.read_text() for path in Path('/proc/self/task').glob('*/children')];"
        f"child = {'os.fork()' if 'child' in state else 1}; child or signal.pause();"
        "print(child, *clients, flush=True); sys.stdin.readline(); tier.has(['a'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, servers.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        child, client = map(int, process.stdout.readline().split())
        if busy:
            servers.master.send_signal(signal.SIGSTOP)
            process.stdin.write(b"\n")
            process.stdin.flush()
            time.sleep(0.5)  # for the call to begin; if it has not, the client ends all the same
        process.kill()
    status = Path(f"/proc/{client}/status")
    deadline = time.monotonic() + PATIENT / 2  # its call would take longer
    try:
        with suppress(FileNotFoundError):
            while "State:\tZ" not in status.read_text():  # its new parent may not wait for it
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        servers.master.send_signal(signal.SIGCONT)
        if child > 1:
            os.kill(child, signal.SIGKILL)


def test_the_client_locks_what_it_may_write(servers: MooncakeServers, arena: Arena) -> None:
    """A successor of a dead writer waits until nobody has these bytes locked; see csrc/store/segment.h."""

    def locked_by(fd: int, start: int, size: int) -> int:
        form = "hhqqi"
        asked = struct.pack(form, fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
        kind, *_, pid = struct.unpack(form, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    others, tier = children(), MooncakeTier(servers.address, timeout=PATIENT)
    tier.register(arena.view[MIB : 2 * MIB], arena.path, MIB)
    connected(tier)
    (client,) = set(children()) - set(others)
    with arena.path.open("r+b") as file:
        fd = file.fileno()
        asked = [locked_by(fd, at, 1) for at in (MIB - 1, MIB, 2 * MIB - 1, 2 * MIB)]
        assert [0, client, client, 0] == asked
        tier.close()
        assert 0 == locked_by(fd, 0, 0)
