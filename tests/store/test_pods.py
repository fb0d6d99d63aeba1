"""Two pods on one store: namespaces of their own, another /dev/shm each; one common folder, or a passed descriptor."""

import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, RankInUseError, WriterActiveError
from shmstore.cli import main as cli
from tests.support import Stores, raises

_POD = """
import os
import socket
import sys
import zlib

import numpy as np

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter

where, rank = sys.argv[1], int(sys.argv[2])
if where.isdigit():  # a connected socket, over which the store's descriptor comes
    data, (fd,), *_ = socket.recv_fds(socket.socket(fileno=int(where)), 65536, 1)
keys, taken = os.pipe(), os.pipe()
if os.fork() == 0:  # the worker, which waits for the store by its name
    os.close(keys[1])
    if where.isdigit():
        reader = ObjectStoreReader.attach(None, rank, fd=fd)
    else:
        reader = ObjectStoreReader.attach("images", rank, dir=where, wait=60)
    for line in os.fdopen(keys[0]):
        ref = ObjectRef.from_bytes(bytes.fromhex(line))
        os.write(taken[1], b"%d\\n" % zlib.crc32(reader.get(ref)))
    os._exit(0)
os.close(keys[0])
os.close(taken[1])
sums = os.fdopen(taken[0])
options = {"capacity": 8 << 20, "n_readers": 2, "n_writers": 2}
own = ObjectStoreWriter.join(fd=fd) if where.isdigit() else ObjectStoreWriter.open("images", dir=where, **options)
with own as writer:
    print(os.getpid(), writer.recovered, *os.listdir("/dev/shm"), flush=True)
    for key in sys.stdin:
        try:
            ref, how = writer.get_cached(key), "hit"
        except KeyError:
            ref, how = writer.put(key, np.random.default_rng(int(key)).bytes(1 << 19)), "miss"
        os.write(keys[1], ref.to_bytes().hex().encode() + b"\\n")
        print(how, sums.readline().strip(), flush=True)
    os.close(keys[1])
    os.wait()
"""


class Pod:
    """A server and its worker in mount, PID, IPC, user and network namespaces.

    `where` is the path that the common folder has there, or the socket over which the store's descriptor comes.
    """

    def __init__(self, where: Path | socket.socket, rank: int, common: Path | None = None) -> None:
        shell = f'mount -t tmpfs none /dev/shm && {sys.executable} -c "$0" $1 $2; exit $?'
        if common is not None:
            Path(str(where)).mkdir(exist_ok=True)
            shell = f"mount --bind {common} {where} && {shell}"
        inherited = [where.fileno()] if isinstance(where, socket.socket) else []
        spaces = "--mount --pid --ipc --user --net --map-root-user --fork --kill-child --mount-proc"
        self._process = subprocess.Popen(
            ["unshare", *spaces.split(), "sh", "-c", shell, _POD, str(inherited[0] if inherited else where), str(rank)],
            pass_fds=inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, self.recovered, *self.shm = self._line()

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def share(self, keys: range) -> set[str]:
        """Let the server hand out images that its worker reads; return how it came by them."""
        assert self._process.stdin is not None
        found = set()
        for key in keys:
            print(key, file=self._process.stdin, flush=True)
            how, checksum = self._line()
            assert zlib.crc32(np.random.default_rng(key).bytes(1 << 19)) == int(checksum)
            found.add(how)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()  # until no process of the pod has the pipe

    def end(self) -> int:
        self._process.communicate()
        return self._process.returncode


@pytest.fixture(autouse=True)
def _user_namespaces() -> None:
    if (ran := subprocess.run(["unshare", "-Ur", "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no user namespaces here: {ran.stderr}")


def is_named(pod: Pod, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """See that errors and `dump` name the pod's processes, whose numbers this namespace does not know."""
    if os.geteuid() != 0:
        return  # only root may look at any process, but perhaps at the first one, which the servers are not
    with raises(RankInUseError, ["of another PID namespace"]):
        ObjectStoreReader.attach("images", 0, dir=folder)
    with raises(WriterActiveError, [f"{pod.pid} (of another PID namespace)"]):
        ObjectStoreWriter.join("images", 0, dir=folder)
    for more, said in (([], "of another PID namespace: process "), (["--json"], f'"elsewhere": [{pod.pid}, ')):
        assert 0 == cli.main(["dump", "images", "--dir", str(folder), *more])
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("by", ["folder", "descriptor"])
def test_two_pods_share_images_and_a_death_costs_none(
    by: str, stores: Stores, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By descriptor, a node agent, which is this process, owns the memory and sends it to each pod that starts."""
    memory = by == "descriptor"
    owner = stores.create(8 << 20, 2, n_writers=2, writes=False, memfd=memory)
    started = []

    def start(rank: int) -> Pod:
        here, there = socket.socketpair()
        with here, there:
            owner.handle.send(here)
            started.append(Pod(there, rank) if memory else Pod(tmp_path / "ab"[rank], rank, folder))
        assert [] == started[-1].shm
        return started[-1]

    try:
        one, other = start(0), start(1)
        if not memory:
            is_named(one, folder, capsys)
        assert [{"miss"}, {"hit"}, {"miss"}] == [one.share(range(5)), other.share(range(5)), other.share(range(5, 10))]
        one.kill()
        assert {"hit"} == other.share(range(5)), "what a dead pod stored can be handed out"
        one = start(0)
        assert {"hit"} == one.share(range(10))
        other.kill()
        other = start(1)
        assert {"hit"} == other.share(range(10))
        assert ["5", "5"] == [one.recovered, other.recovered]
        assert [0, 0] == [one.end(), other.end()]
    finally:
        for pod in started:
            pod.kill()
    if not memory:
        assert ["images"] == os.listdir(folder)
        assert 0 == cli.main(["verify", "images", "--dir", str(folder)])
