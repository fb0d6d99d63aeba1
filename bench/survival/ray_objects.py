"""Ray's object store: ray.put in an actor, which owns the object, and ray.get in others."""

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from bench.survival.scene import ENDS, HANGS, PATIENCE, ROOM, Array, Cast, Part, Reader, Way, Writer, payload


class Ray(Way):
    """The scene is the driver. There is no second raylet without a second cluster."""

    title = "Ray's object store"
    servers = ("raylet", "gcs_server")

    def serve(self, server: str = "") -> bool:
        if server:
            return False
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        import ray

        ray.init(
            num_cpus=3,
            object_store_memory=80 << 20,  # the least that it takes
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=self.folder,
        )
        return True

    def settle(self, victim: str) -> float:
        return 75.0 if victim == "gcs_server" else 5.0  # a raylet waits 60 seconds for it

    def stop(self) -> None:
        import ray

        ray.shutdown()

    def start(self) -> Cast:
        return ActorCast(self)

    def write(self) -> None:
        self._kept: list[Any] = []

    def put(self, number: int) -> Any:
        import ray

        del self._kept[: -ROOM + 1]
        self._kept.append(ray.put(payload(number)))
        return [self._kept[-1]]  # a reference by itself would be replaced by the object on its way

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        import ray

        return ray.get(ticket[0]), lambda: None


class ReaderActor:
    def __init__(self, way: Way, rank: int) -> None:
        self._tickets: deque[Any] = deque()
        self._part = Reader(way, rank, self._tickets.popleft)

    def send(self, ticket: Any) -> None:
        self._tickets.append(ticket)

    def do(self, *order: Any) -> Any:
        return self._part.do(*order)

    def pid(self) -> int:
        return os.getpid()


class WriterActor:
    def __init__(self, way: Way, readers: list[Any]) -> None:
        import ray

        self._part = Writer(way, [lambda ticket, to=one: ray.get(to.send.remote(ticket)) for one in readers])

    def do(self, *order: Any) -> Any:
        return self._part.do(*order)

    def pid(self) -> int:
        return os.getpid()


class Actor:
    """A part that is an actor."""

    def __init__(self, kind: type[Any], *arguments: Any) -> None:
        import ray

        self.handle = ray.remote(num_cpus=1)(kind).remote(*arguments)
        self.pid: int = ray.get(self.handle.pid.remote(), timeout=PATIENCE)

    def ask(self, *order: Any) -> Any:
        import ray

        try:
            return ray.get(self.handle.do.remote(*order), timeout=PATIENCE)
        except ray.exceptions.GetTimeoutError:
            return HANGS
        except ray.exceptions.RayActorError:
            return ENDS


class ActorCast(Cast):
    """Actors, whose processes Ray starts."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.readers = [Actor(ReaderActor, way, rank) for rank in range(2)]
        self.writer = self.new_writer()

    def new_writer(self) -> Part:
        return Actor(WriterActor, self._way, [reader.handle for reader in self.readers])
