"""Ray's object store on one host: ray.put, the reference as an actor's argument, ray.get in the actor."""

import os
import shutil
import tempfile
import warnings
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from bench.peers.interface import Arrays, Peer, Tree, arrays, tensors, touch


class _Actor:
    """A reader; Ray starts its process."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def ready(self) -> bool:
        return True

    def take(self, boxed: list[Any]) -> int:
        """Get the object (a list around the reference keeps Ray from getting it before the call) and touch it."""
        return touch(tensors(ray.get(boxed[0])))


class Index:
    """What a program keeps in an actor of Ray: the reference for each key, in a list, or Ray would get the value."""

    def __init__(self) -> None:
        self._stored: dict[str, list[Any]] = {}

    def get(self, key: str) -> list[Any] | None:
        return self._stored.get(key)

    def store(self, key: str, boxed: list[Any]) -> None:
        self._stored[key] = boxed


class RayObjects(Peer):
    """Readers are actors: calling them is Ray's way of telling, their answer its way of acknowledging."""

    title = "ray.put / ray.get"
    package = "ray"
    how = "`ray.put` of the arrays, an actor's call with the reference, `ray.get` in the actor. A hit: the call again."

    def start(self, count: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray")
        ray.init(
            num_cpus=count,
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=self._folder,
        )
        actor = ray.remote(num_cpus=1)(_Actor)
        self._all = [actor.remote() for _ in range(count)]
        ray.get([one.ready.remote() for one in self._all])

    def open(self, nbytes: int, n_readers: int) -> None:
        self._actors = self._all[:n_readers]
        self._ref: Any = None
        self._answers: list[Any] = []

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        self._ref = ray.put(value)
        self.send_again()

    def send_again(self) -> None:
        self._answers = [actor.take.remote([self._ref]) for actor in self._actors]

    def wait(self) -> list[int]:
        found: list[int] = ray.get(self._answers)
        return found

    def close(self) -> None:
        self._ref = None
        self._answers = []

    def stop(self) -> None:
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
