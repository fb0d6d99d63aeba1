"""The part of a store in which one engine keeps what it encodes, and what it has of the others' parts."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from shmstore.device import download, finish
from shmstore.errors import DeviceError, ObjectExistsError, ShmStoreError, StoreSpaceError, WriterActiveError
from shmstore.integrations.encoder import KIND, file_of
from shmstore.integrations.encoder.attaching import attach, made_again, stored_tensor
from shmstore.integrations.encoder.settings import START, Settings
from shmstore.multimodal.caches.shm_receiver import get_patiently
from shmstore.refs import ObjectRef
from shmstore.serde import TensorSpec
from shmstore.store import ObjectStoreReader, ObjectStoreWriter, Reservation
from shmstore.store.claims import Claim

_log = logging.getLogger(__name__)

FIGURES = {
    "hits": "Items whose encoder output was in the store",
    "encoded": "Items that this engine encoded",
    "deferred": "Requests that waited for an output of another engine",
    "unclaimed": "Items encoded though another engine was making them, because their requests had waited long enough",
    "wrong": "Items that were not loaded, because what is stored under their key is not an encoder output for them",
    "stored": "Encoder outputs stored",
    "stored_bytes": "Bytes of encoder outputs stored",
    "evicted": "Encoder outputs evicted from this engine's part of the store",
    "refused": "Encoder outputs that the store did not take, because it was full or they were too large",
    "unstored": "Encoder outputs of an engine that only reads, because as many others store as the store has parts",
}
"""The counters, and what they count."""
APART = "1 if the engine shares encoder outputs with no other until its restart, because the weights may have changed"
"""What the gauge `apart` says."""


def open_store(settings: Settings, kind: str = KIND, what: str = "encoder outputs") -> ObjectStoreWriter | None:
    """Open the store, or make it; None if as many engines store as it has parts."""
    quota = None if settings.quota_gb is None else {kind: settings.quota_gb / settings.capacity_gb}
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
        _log.warning("%s are read from store %s, and none are stored: %s", what, settings.store, error)
        return None
    except StoreSpaceError as error:
        error.hint = (
            f"give {error.folder} the capacity_gb of each engine that stores, and room for the tables (size= of its "
            "mount, sizeLimit, --shm-size); or use a smaller one, and if there is a store " + made_again(settings)
        )
        raise
    _log.info("%s go through store %s of shmstore; this engine's part has %d", what, settings.store, len(writer))
    return writer


def lock_pages(writer: ObjectStoreWriter) -> None:
    """Let copies into this engine's part of the store be asynchronous, if the driver does."""
    try:
        writer.register_host_memory()
    except DeviceError as error:
        _log.warning("encoder outputs are copied to host memory that is not page-locked: %s", error)


def _commit(output: Any, event: Any, place: Reservation, claim: Claim | None) -> None:
    """Store a copy from a device when it is done; `output` is kept until then."""
    event.synchronize()
    place.commit()  # an error, of a store that was closed meanwhile, is the future's
    if claim is not None:
        claim.end()


class Outputs:
    """What one process has of the store."""

    kind, what = KIND, "encoder outputs"

    def __init__(
        self, settings: Settings, device: str, *, stores: bool = True, reads: bool = True, views: bool = False
    ) -> None:
        """Open the store, or make it, and attach. `views`: on a CPU, what is read is the store's own memory."""
        self._device = device
        self._settings = settings
        self._views = views
        self._figures: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._pool = ThreadPoolExecutor(1, "shmstore-copies")  # since no step may follow the one that has begun a copy
        self._writer = open_store(settings, self.kind, self.what) if stores else None
        self._only_reads = stores and self._writer is None
        if self._writer is not None:
            self._evicted = self._writer.stats().evictions
            self._file = file_of(self._writer)
            if device == "cuda":
                lock_pages(self._writer)
        self._reader: ObjectStoreReader | None = None
        if reads:
            try:
                self._reader = attach(settings)
            except BaseException:
                self.close()
                raise

    @property
    def reader(self) -> ObjectStoreReader:
        """Where outputs are found."""
        return cast(ObjectStoreReader, self._reader)  # only a process that reads asks for it

    @property
    def stores(self) -> bool:
        """Whether this process stores."""
        return self._writer is not None

    def read(self, ref: ObjectRef) -> Any:
        """Return a stored output on the device; somebody holds it meanwhile."""
        if self._device == "cuda":
            output = get_patiently(self.reader, ref, device=self._device)
            self._pool.submit(finish)  # release what was copied from
            return output
        output = get_patiently(self.reader, ref, copy=not self._views)
        return output if self._device == "cpu" else output.to(self._device)

    def store(self, key: str, namespace: str, output: Any, claim: Claim | None = None) -> None:
        """Store an output, and end the claim on it when that is done; the engine goes on if it cannot be stored."""
        if self._writer is None:
            if self._only_reads:
                self.count("unstored")
            return
        if file_of(self._writer) != self._file:
            self.warn(
                "store %s, or its folder, was removed, and no other engine finds these %s: restart this one",
                self._settings.store,
                self.what,
            )
        try:
            if self._put(self._writer, key, namespace, output, claim):
                claim = None
        except ObjectExistsError:
            return
        except ShmStoreError as error:  # full or too large
            self.count("refused")
            more = f"for a larger capacity_gb or quota_gb, {made_again(self._settings)}"
            self.warn("some %s were not stored, and others may not be: %s (%s)", self.what, error.message, more)
            return
        finally:
            if claim is not None:
                claim.end()
        self.count("stored")
        if new := self._writer.stats().evictions - self._evicted:
            self.count("evicted", new)
            self._evicted += new

    def _put(self, writer: ObjectStoreWriter, key: str, namespace: str, output: Any, claim: Claim | None) -> bool:
        """Store an output; return whether that goes on, and then ends the claim."""
        place = self._begin(writer, key, namespace, output)
        self.count("stored_bytes", output.nbytes)
        if output.device.type == "cuda":
            self._pool.submit(_commit, output, download(output, place.value), place, claim)
            return True
        place.value.copy_(output)
        place.commit()
        return False

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

    def warn(self, text: str, *what: object) -> None:
        """Log, once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *what)

    def settle(self) -> None:
        """Wait until everything that was to be stored is stored, and the claims on it have ended."""
        self._pool.submit(int).result()

    def count(self, name: str, count: int = 1) -> None:
        """Count what the engine has done with outputs, by the names in `FIGURES`."""
        self._figures[name] += count

    def figures(self) -> Counter[str]:
        """Return what was counted since the last call, by the names in `FIGURES`."""
        figures, self._figures = self._figures, Counter()
        return figures

    def close(self) -> None:
        """Close the store, which stays, when the copies are done."""
        self._pool.shutdown()
        for one in (self._reader, self._writer):
            if one is not None:
                one.close()
