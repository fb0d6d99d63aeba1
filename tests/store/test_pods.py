"""Two pods on one store: namespaces of their own, another /dev/shm each, and one common folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, RankInUseError, WriterActiveError
from shmstore.cli import main as cli
from tests.support import SHM, raises, store_name

_POD = """
import os
import sys

import numpy as np

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter

folder, rank = sys.argv[1], int(sys.argv[2])
keys, taken = os.pipe(), os.pipe()
if os.fork() == 0:  # the worker, which waits for the store by its name
    os.close(keys[1])
    reader = ObjectStoreReader.attach("images", rank, dir=folder, wait=60)
    for line in os.fdopen(keys[0]):
        ref = ObjectRef.from_bytes(bytes.fromhex(line))
        os.write(taken[1], b"%d\\n" % reader.get(ref)[0])
    os._exit(0)
os.close(keys[0])
os.close(taken[1])
sums = os.fdopen(taken[0])
options = {"capacity": 8 << 20, "n_readers": 2, "n_writers": 2}
with ObjectStoreWriter.open("images", dir=folder, **options) as writer:
    print(os.getpid(), writer.recovered, *os.listdir("/dev/shm"), flush=True)
    for key in sys.stdin:
        try:
            ref, how = writer.get_cached(key), "hit"
        except KeyError:
            ref, how = writer.put(key, np.full(1 << 16, int(key))), "miss"
        os.write(keys[1], ref.to_bytes().hex().encode() + b"\\n")
        print(how, sums.readline().strip(), flush=True)
    os.close(keys[1])
    os.wait()
"""


@pytest.fixture
def common() -> Iterator[Path]:
    path = SHM / store_name()
    path.mkdir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


class Pod:
    """A server and its worker in mount, PID, IPC, user and network namespaces; the folder has a path of its own."""

    def __init__(self, common: Path, mount: Path, rank: int) -> None:
        mount.mkdir(exist_ok=True)
        shell = (
            f'mount --bind {common} {mount} && mount -t tmpfs none /dev/shm && {sys.executable} -c "$0" $1 $2; exit $?'
        )
        spaces = "--mount --pid --ipc --user --net --map-root-user --fork --kill-child --mount-proc"
        self._process = subprocess.Popen(
            ["unshare", *spaces.split(), "sh", "-c", shell, _POD, str(mount), str(rank)],
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
            how, first = self._line()
            assert str(key) == first
            found.add(how)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        self._process.communicate()
        return self._process.returncode


@pytest.fixture
def start(common: Path, tmp_path: Path) -> Iterator[Callable[[str, int], Pod]]:
    started: list[Pod] = []

    def pod(mount: str, rank: int) -> Pod:
        started.append(Pod(common, tmp_path / mount, rank))
        return started[-1]

    yield pod
    for one in started:
        one.kill()


def test_two_pods_share_images_through_one_folder_and_a_death_costs_none(
    common: Path, start: Callable[[str, int], Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    if (ran := subprocess.run(["unshare", "-Ur", "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no user namespaces here: {ran.stderr}")
    images, others = range(10), range(10, 20)
    one, other = start("a", 0), start("b", 1)
    assert [[]] * 2 == [one.shm, other.shm]
    if os.geteuid() == 0:  # who may look at any process, but perhaps at the first one, which the servers are not
        with raises(RankInUseError, ["of another PID namespace"]):
            ObjectStoreReader.attach("images", 0, dir=common)
        with raises(WriterActiveError, [f"{one.pid} (of another PID namespace)"]):
            ObjectStoreWriter.join("images", 0, dir=common)
        for more, said in (([], "of another PID namespace: process "), (["--json"], f'"elsewhere": [{one.pid}, ')):
            assert 0 == cli.main(["dump", "images", "--dir", str(common), *more])
            assert said in capsys.readouterr().out
    assert {"miss"} == one.share(images)
    assert {"hit"} == other.share(images)
    assert {"miss"} == other.share(others)
    one.kill()
    assert {"hit"} == other.share(images), "what a dead pod stored can be handed out"
    one = start("a", 0)
    assert "10" == one.recovered
    assert {"hit"} == one.share(range(20))
    other.kill()
    other = start("b", 1)
    assert "10" == other.recovered
    assert {"hit"} == other.share(range(20))
    assert [0, 0] == [one.end(), other.end()]
    assert ["images"] == os.listdir(common)
    command = [sys.executable, "-m", "shmstore", "verify", "images", "--dir", str(common)]
    assert 0 == subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
