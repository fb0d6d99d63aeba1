"""The store of a tokenizer process: made when the first tensor comes, with one reference for each hand-out.

A tensor is stored under its item's hash, if SGLang has computed one or was given it, and then it is there for later
requests. Else its key is a number of this process that belongs to the tensor object: the samples of one request send
the same object, and share what is stored. That key ends with the object. An `id()` would not do, because it is used
again; nor would torch's version of the tensor, because it misses writes through numpy.

A hash that a caller gave may name another tensor today, and a tensor may have been written to since it was stored. So
what is stored is compared with the given tensor, which takes its place if they differ. In a named store, which others
take over, such a hash is in a namespace of this process.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import secrets
import sys
import threading
import weakref
from contextlib import suppress

import sglang
import torch
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch.utils.weak import WeakIdKeyDictionary

from shmstore.errors import ObjectNotFoundError, ShmStoreError, unless_interrupted
from shmstore.files import classify
from shmstore.integrations.sglang import RUN, STORE, capacity
from shmstore.places import place_of
from shmstore.refs import ObjectRef
from shmstore.store import LeasedRef, ObjectStoreWriter, StoreOptions
from shmstore.store.batch import internals_of

_log = logging.getLogger("sglang.shmstore")


class Sender:
    """The writer of this process, as soon as it has one."""

    def __init__(self) -> None:
        self.writer: ObjectStoreWriter | None = None
        self.files = 0
        """Tensors that went by SGLang's own files."""
        self._lock = threading.Lock()
        self._run, self._numbers = secrets.token_hex(8), itertools.count()
        self._keys = WeakIdKeyDictionary()
        self.hashed = WeakIdKeyDictionary()
        """Tensors whose hash SGLang has made itself."""
        self._namespace = ""
        self._engine: object = None
        """The settings of the engine that the store is for: its ranks and its model are those of the store."""

    def hand_out(
        self, tensor: torch.Tensor, known_hash: int | None
    ) -> tuple[ObjectRef, ObjectStoreWriter, LeasedRef | None] | None:
        """Store the tensor, or find it, and return a reference that waits for every rank; None if that fails.

        One of several replicas will read it, and nobody knows which: then it waits for the end of the lease.
        """
        try:
            with self._lock:
                writer = self._opened()
                key, namespace = self._key_of(tensor, known_hash)
                ref = _stored(writer, key, namespace, tensor) or writer.put(key, tensor, namespace=namespace)
            return ref, writer, writer.hold(ref) if has_replicas() else None
        except unless_interrupted(Exception) as error:  # of whatever kind: the request goes on without the store
            self._count_file(error)
            return None

    def _key_of(self, tensor: torch.Tensor, known_hash: int | None) -> tuple[str, str | None]:
        if known_hash is not None:  # an item's feature and its embeddings have one hash
            ours = tensor in self.hashed or not os.environ.get(STORE)  # else a caller may have given it
            scope = self._namespace if ours else f"{self._namespace} {self._run}"
            return f"{known_hash:x} {tensor.dtype} {tuple(tensor.shape)}", scope
        key: str | None = self._keys.get(tensor)  # type: ignore[no-untyped-call]
        if key is None:
            key = self._keys[tensor] = f"{self._run}-{next(self._numbers)}"
            weakref.finalize(tensor, self._forget, key).atexit = False
        return key, None

    def _forget(self, key: str) -> None:
        with suppress(ShmStoreError):
            if self.writer is not None:
                self.writer.delete(key)

    def _opened(self) -> ObjectStoreWriter:
        if self._engine is not (engine := get_server_args()):  # the first one of this process, or the next one
            if self.writer is not None:
                if classify(place_of(self.writer.name)).ranks_alive:
                    raise RuntimeError("another engine of this process uses its store")
                self.writer.close()
            self._engine, self.writer = engine, None
        if self.writer is None:
            self._namespace, self.writer = _namespace(), _open()
            if "prometheus_client" in sys.modules:  # SGLang must set a variable before anybody imports it
                from shmstore.integrations.totals import show_totals

                show_totals(self.writer.name)
            came = self.writer.recovered
            _log.info("tensors go through store %s of shmstore, with %d from before", self.writer.name, came)
        return self.writer

    def _count_file(self, error: Exception) -> None:
        self.files += 1
        if math.log10(self.files).is_integer():  # the 1st, 10th, 100th
            _log.warning("%d tensors went by SGLang's own files, the last one because of: %s", self.files, error)


def has_replicas() -> bool:
    """Return whether a request goes to one of several replicas, which is chosen after its tensors were stored."""
    parallel = get_parallel()
    return bool(parallel.dp_size > 1 or parallel.attn_dp_enabled)


def _open() -> ObjectStoreWriter:
    parallel, workers = get_parallel(), get_server_args().tokenizer_worker_num
    ranks = parallel.tp_size if parallel.attn_dp_enabled else parallel.tp_size * parallel.dp_size
    options: StoreOptions = {
        "capacity": capacity() // workers,
        "n_readers": ranks,
        "n_writers": workers,
        "prefault": True,
    }
    if named := os.environ.get(STORE):
        return ObjectStoreWriter.open(named, **options)
    if workers > 1:  # each of these processes opens it
        return ObjectStoreWriter.open(os.environ[RUN], keep=False, **options)
    return ObjectStoreWriter.create(**options)


def _stored(writer: ObjectStoreWriter, key: str, namespace: str | None, tensor: torch.Tensor) -> ObjectRef | None:
    """Hand out what is stored under the key if it is this tensor; else remove it, and return None."""
    try:
        ref = writer.get_cached(key, namespace=namespace)
    except ObjectNotFoundError:
        return None
    same = False
    try:
        same = internals_of(writer).equals(ref, tensor)
    finally:
        if not same:
            writer.cancel(ref)
    if same:
        return ref
    writer.delete(key, namespace=namespace)
    return None


def _namespace() -> str:
    """Return a name for all that an item's hash does not cover: a caller may have made it of the image alone."""
    given = get_server_args()
    parts = [
        sglang.__version__,
        *(getattr(given, name, None) for name in ("model_path", "revision", "mm_process_config")),
    ]
    return "sglang-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


sender = Sender()
