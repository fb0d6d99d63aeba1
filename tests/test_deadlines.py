"""A deadline of the caller's, which its signal handler raises while foreign code runs, is no failure of that code."""

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

import shmstore
from shmstore import ObjectStoreReader, ObjectStoreWriter, PickleSerde
from shmstore.bindings import store as native
from shmstore.errors import unless_interrupted
from shmstore.integrations import compare, sglang, vllm
from shmstore.multimodal import hash_item
from shmstore.multimodal.caches.stored_updates import StoredUpdates
from shmstore.scheduler.block_pool import BlockPool
from shmstore.scheduler.checks import plain_token_ids
from shmstore.serde import MsgpackSerde
from shmstore.serde.registry import BY_NAME
from shmstore.tiers import StoreTier, directory
from shmstore.tiers.mooncake import _Client, _Lane
from tests.support import store_name
from tests.tiers.memory import MemoryTier

Patch = pytest.MonkeyPatch


class Deadline(Exception):  # noqa: N818 - a name of the caller's
    """As Celery's: not an OSError, nor a BaseException alone."""


def ring(*_: Any, **__: Any) -> Any:
    """Foreign code during which the signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(params=[Deadline, TimeoutError])
def due(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """What the handler raises."""

    def handler(*_: Any) -> None:
        raise request.param

    before = signal.signal(signal.SIGUSR1, handler), signal.signal(signal.SIGALRM, handler)
    yield request.param
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGALRM, before[1])


class Ringing:
    """A value whose sum and pickle ring."""

    __radd__ = ring

    def __reduce__(self) -> Any:
        return ring, ()


def image(patch: Patch, part: str) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="Pillow comes with the demo extra")
    if part == "is_animated":
        patch.setattr(pillow.Image, part, property(ring), raising=False)
    else:
        patch.setattr(pillow.Image, part, ring)
    hash_item(pillow.new("RGB", (2, 2)))


def decoded(serde: Any, value: Any) -> None:
    encoded = serde.encode(value)
    serde.decode(encoded.meta, bytearray(encoded.keepalive or b""))


def from_tree(patch: Patch) -> None:
    size = torch.zeros(2).shape
    patch.setitem(BY_NAME, "torch.Size", BY_NAME["torch.Size"]._replace(from_tree=ring))
    decoded(MsgpackSerde(), size)


def tier(call: str) -> None:
    back_end = MemoryTier()
    with ObjectStoreWriter.create(capacity=6400, n_readers=1) as writer:
        subject = StoreTier(writer, back_end)
        setattr(back_end, call, ring)
        try:
            getattr(subject, call)(*["k"] * (call == "fetch"))
        finally:
            vars(back_end).pop("close", None)
            subject.close()


def resp(patch: Patch) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed: pip install '.[redis]'")
    from shmstore.tiers.resp import RespTier

    subject = RespTier("redis://localhost")
    patch.setattr(subject._pool, "get_connection", ring)
    subject.has(["k"])


def in_folder(patch: Patch) -> None:
    patch.setattr(directory, "name_of", ring)
    directory.DirectoryTier("/tmp").has(["k"])


def connecting() -> None:
    client = SimpleNamespace(_connecting=threading.Lock(), addresses=[], dead=False, _first=Mock(recv_bytes=ring))
    _Client._connect(client, 0)  # type: ignore[arg-type]


def stub(patch: Patch, name: str, **has: Any) -> None:
    module = ModuleType(name)
    vars(module).update(has)
    patch.setitem(sys.modules, name, module)


def imported(patch: Patch, package: ModuleType, name: str) -> Any:
    """Return a module of a plug-in that has imported stubs, and leave no trace of it."""
    patch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    patch.delattr(package, name, raising=False)
    module = import_module(f"{package.__name__}.{name}")
    del sys.modules[module.__name__], vars(package)[name]
    return module


def vllm_updates(patch: Patch) -> None:
    content = make_dataclass("Content", ["full", "is_embed"])
    content.__module__ = "vllm.multimodal.processing"
    update = make_dataclass("Update", ["modality", "item_idx", "mode", "target", "content"])
    for name in ("vllm", "vllm.multimodal"):
        stub(patch, name)
    module = {"PromptUpdateDetails": content, "ResolvedPromptUpdate": update, "UpdateMode": None}
    stub(patch, "vllm.multimodal.processing", **module)
    updates = imported(patch, vllm, "updates")
    updates.encode_updates([update("image", 0, None, "", content([1], ring))])


def sglang_sender(patch: Patch) -> None:
    stub(patch, "sglang", __version__="0")
    stub(patch, "sglang.srt")
    stub(patch, "sglang.srt.runtime_context", get_parallel=None, get_server_args=ring)
    imported(patch, sglang, "sender").Sender().hand_out(torch.zeros(2), 1)


def register(patch: Patch, plugin: Any) -> None:
    for name in ("SHMSTORE_VLLM", "SHMSTORE_SGLANG", sglang.AGREED, sglang.GIB):
        patch.delenv(name, raising=False)
    patch.setattr(compare, "resolve_name", ring)
    plugin.register()


def opened(patch: Patch, role: Any, call: str, opening: Callable[[], object]) -> None:
    patch.setattr(role, call, ring)
    opening()


def waiting() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    ObjectStoreReader.attach(store_name(), wait=3600)


AROUND: dict[str, Callable[[Patch], object]] = {
    **{f"Pillow's {part}": partial(image, part=part) for part in ("load", "getexif", "is_animated")},
    "a from_tree": from_tree,
    "an unpickled object": lambda _: decoded(PickleSerde(), Ringing()),
    "a decode_updates": lambda _: StoredUpdates.unpacked(Mock(_decode=ring), b"1", "k"),
    "a collector": lambda _: BlockPool(9, True, metrics=Mock(on_block_accessed=ring)).notify_metrics(
        b"1" * 8, b"", b""
    ),
    "a token": lambda _: plain_token_ids("tokens", [1, Ringing()]),
    "create": lambda patch: opened(
        patch, native.Writer, "create", partial(ObjectStoreWriter.create, capacity=6400, n_readers=1)
    ),
    "recover": lambda patch: opened(patch, native.Writer, "recover", partial(ObjectStoreWriter.recover, "none")),
    "attach": lambda patch: opened(patch, native.Reader, "attach", partial(ObjectStoreReader.attach, "none")),
    "attach that waits": lambda _: waiting(),
    "a tier's fetch": lambda _: tier("fetch"),
    "a tier's close": lambda _: tier("close"),
    "redis-py": resp,
    "a folder": in_folder,
    "Mooncake's start": lambda _: connecting(),
    "Mooncake's client": lambda _: _Lane(MagicMock(), Mock(send_bytes=ring), memoryview(b"")).ask("has"),
    "SGLang's source": partial(register, plugin=sglang),
    "SGLang's settings": sglang_sender,
    "vLLM's source": partial(register, plugin=vllm),
    "vLLM's masks": vllm_updates,
}


@pytest.mark.parametrize("where", AROUND)
def test_what_the_callers_handler_raises_in_foreign_code_reaches_the_caller(
    where: str, due: type[Exception], monkeypatch: Patch
) -> None:
    with pytest.raises(due) as caught:
        AROUND[where](monkeypatch)
    assert due is caught.type


def test_only_threads_of_our_own_where_no_handler_runs_take_any_error() -> None:
    root = Path(shmstore.__file__).parent
    broad = re.compile(r"except Exception|suppress\(Exception")
    found = [path.name for path in sorted(root.rglob("*.py")) if broad.search(path.read_text("utf-8"))]
    assert ["breaker.py", "write_behind.py"] == found


class Late:
    """Handlers of each form."""

    def method(self, number: int, frame: Any) -> None:
        raise Deadline

    def __call__(self, *_: Any) -> None:
        self.method(0, None)


def bad(frame: Any = None) -> Any:
    yield
    raise Deadline


def fail(code: Callable[[], object], kind: type[Exception]) -> str:
    try:
        code()
    except unless_interrupted(kind):
        return "failed"
    return "done"


@pytest.mark.parametrize(
    ("handler", "code", "expected"),
    [
        (Late().method, ring, "interrupted"),
        (Late(), ring, "interrupted"),
        (partial(lambda more, number, frame: more.method(0, None), Late()), ring, "interrupted"),
        (lambda *_: None, lambda: Late().method(0, None), "failed"),
        (lambda *_: None, lambda: list(bad()), "failed"),  # a generator's frame has none below it, once it has ended
    ],
)
def test_a_handler_is_known_by_its_frame(handler: Any, code: Callable[[], object], expected: str) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert expected == fail(code, Deadline)
    except Deadline:
        assert "interrupted" == expected
    finally:
        signal.signal(signal.SIGUSR1, before)
