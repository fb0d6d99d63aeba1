"""The workers' side of the connector: each rank of the first stage loads, and the first of them stores."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from shmstore.device import download, finish
from shmstore.errors import DeviceError, ObjectExistsError, ShmStoreError, StoreSpaceError, WriterActiveError
from shmstore.integrations.vllm.encoder.attaching import attach, made_again, stored_tensor
from shmstore.integrations.vllm.encoder.messages import Report, Step
from shmstore.integrations.vllm.encoder.settings import START, Settings
from shmstore.integrations.vllm.shared import KIND, file_of
from shmstore.multimodal.caches.shm_receiver import get_patiently
from shmstore.refs import ObjectRef
from shmstore.serde import TensorSpec
from shmstore.store import ObjectStoreReader, ObjectStoreWriter, Reservation

_log = logging.getLogger("vllm.shmstore")


def open_store(settings: Settings) -> ObjectStoreWriter | None:
    """Open the store, or make it; None if as many engines store as it has parts."""
    quota = None if settings.quota_gb is None else {KIND: settings.quota_gb / settings.capacity_gb}
    try:
        writer = ObjectStoreWriter.open(
            settings.store,
            quotas=quota,
            on_mismatch="accept",
            wait=START,
            allow_uid=settings.allow_uid,
            **settings.store_options,
        )
    except WriterActiveError as error:
        _log.warning("encoder outputs are read from store %s, and none are stored: %s", settings.store, error)
        return None
    except StoreSpaceError as error:
        error.hint = (
            f"give {error.folder} the capacity_gb of each engine that stores, and room for the tables (size= of its "
            "mount, sizeLimit, --shm-size); or use a smaller one, and if there is a store " + made_again(settings)
        )
        raise
    _log.info("encoder outputs go through store %s of shmstore; this engine's part has %d", settings.store, len(writer))
    return writer


def lock_pages(writer: ObjectStoreWriter) -> None:
    """Let copies into this engine's part of the store be asynchronous, if the driver does."""
    try:
        writer.register_host_memory()
    except DeviceError as error:
        _log.warning("encoder outputs are copied to host memory that is not page-locked: %s", error)


def _commit(output: Any, event: Any, place: Reservation) -> None:
    """Store a copy from a device when it is done; `output` is kept until then."""
    event.synchronize()
    place.commit()  # an error, of a store that was closed meanwhile, is the future's


class WorkerSide:
    """What one worker has of the store. The stages after the first neither encode nor load."""

    def __init__(self, settings: Settings, device: str, *, stores: bool) -> None:
        self._device = device
        self._settings = settings
        self._views = settings.read == "views"
        self._figures: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._pool = ThreadPoolExecutor(1, "shmstore-copies")  # since no step may follow the one that has begun a copy
        self._writer: ObjectStoreWriter | None = None
        self._reader: ObjectStoreReader | None = None
        self._only_reads = False
        self._file: int | None = None
        self._evicted = 0
        if get_pp_group().is_first_rank:
            if stores and get_tp_group().rank_in_group == 0:
                self._writer = open_store(settings)
                self._only_reads = self._writer is None
                if self._writer is not None:
                    self._evicted = self._writer.stats().evictions
                    self._file = file_of(self._writer)
                    if device == "cuda":
                        lock_pages(self._writer)
            self._reader = attach(settings)

    def load(self, step: Step, cache: dict[str, Any]) -> None:
        """Put the outputs of this step into vLLM's cache; the scheduler holds them meanwhile."""
        if self._reader is not None:
            for identifier, ref in step.loads.items():
                cache[identifier] = self._read(self._reader, ref)
            if self._device == "cuda":  # release what was copied from
                self._pool.submit(finish)

    def _read(self, reader: ObjectStoreReader, ref: ObjectRef) -> Any:
        if self._device == "cuda":
            return get_patiently(reader, ref, device=self._device)
        output = get_patiently(reader, ref, copy=not self._views)
        return output if self._device == "cpu" else output.to(self._device)

    def save(self, step: Step, identifier: str, output: Any) -> None:
        """Store an output that the scheduler wants stored."""
        key = step.saves.get(identifier)
        if key is None:
            return
        if self._writer is None:
            if self._only_reads:
                self._figures["unstored"] += 1
            return
        if file_of(self._writer) != self._file:
            self._warn(
                "store %s, or its folder, was removed, and no other engine finds these outputs: start anew",
                self._settings.store,
            )
        try:
            place = self._begin(self._writer, key, step.namespace, output)
            if output.device.type == "cuda":
                self._pool.submit(_commit, output, download(output, place.value), place)
            else:
                place.value.copy_(output)
                place.commit()
        except ObjectExistsError:
            return
        except ShmStoreError as error:  # full or too large: the engine goes on without
            self._figures["refused"] += 1
            more = f"for a larger capacity_gb or quota_gb, {made_again(self._settings)}"
            self._warn("an encoder output was not stored, and others may not be: %s (%s)", error.message, more)
            return
        self._figures["stored"] += 1
        self._figures["stored_bytes"] += output.nbytes
        if new := self._writer.stats().evictions - self._evicted:
            self._figures["evicted"] += new
            self._evicted += new

    def _begin(self, writer: ObjectStoreWriter, key: str, namespace: str, output: Any) -> Reservation:
        """Take space for an output, in the place of something else that is no such output."""
        template = TensorSpec(output.shape, output.dtype)
        begin = partial(writer.begin, key, template, kind=KIND, namespace=namespace, unless_stored=True)
        try:
            return begin()
        except ObjectExistsError:
            if self._reader is None or (found := self._reader.find(key, namespace=namespace)) is None:
                raise
            there = stored_tensor(self._reader, found.ref)
            if there is not None and (there.shape, there.dtype) == (output.shape, output.dtype):
                raise
            writer.delete(key, namespace=namespace)
            return begin()

    def _warn(self, text: str, *what: str) -> None:
        """Log, once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *what)

    def report(self) -> Report | None:
        """Return what was counted since the last report."""
        figures, self._figures = self._figures, Counter()
        return Report(figures) if figures else None

    def close(self) -> None:
        """Close the store, which stays, when the copies are done."""
        self._pool.shutdown()
        for one in (self._reader, self._writer):
            if one is not None:
                one.close()
