"""What tokenizer processes make of images, in one store of the host: what one has processed, the others find.

SGLang calls it an artifact: a record of one image and of all options that change it, by the SHA-256 of both. Each
tokenizer process caches its own. If that cache misses, we look into the store. If the store misses, too, `_compute`
claims the keys, lets SGLang process the images in one call, and stores them. Only then does it wait for images that
other processes make, so no two processes wait for each other. What is in the store is not in SGLang's own cache.

What is found has read-only views of the store, which pin it until they are sent. SGLang, whose requests share what its
cache has, writes to none. A record that has something else than plain data, or whose tensors are on a device, stays in
SGLang's own cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Any

import torch
from sglang.srt.multimodal.media_artifacts.base import MediaArtifactInput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_model, get_server_args, get_serving, process_model_config

from shmstore.errors import ObjectBusyError, ShmStoreError, UnsupportedValueError, unless_interrupted
from shmstore.integrations.encoder.outputs import Outputs
from shmstore.integrations.encoder.settings import Settings
from shmstore.integrations.sglang import PREPROCESS, settings
from shmstore.integrations.sglang.encoder import metrics, scope_of
from shmstore.store import ObjectStoreWriter
from shmstore.store.claims import Claim
from shmstore.store.leases import PinnedRef

_log = logging.getLogger("sglang.shmstore")

_OPENING = 5.0
"""Seconds that an image waits for the store to be opened; then it is not shared."""
_MIXIN = "sglang.srt.multimodal.media_artifacts.base.MediaArtifactCacheMixin"
_WRONG = (ShmStoreError, AttributeError, LookupError, TypeError, ValueError)
"""The errors of what any program may have stored under the key of a record."""
FIGURES = {
    "hits": "Images whose record was in the store",
    "processed": "Images that this process has processed",
    "unclaimed": "Images processed though another process did so, because their requests had waited long enough",
    "wrong": "Images whose record was not taken, because what is stored under their key is not a record",
    "stored": "Records of images stored",
    "stored_bytes": "Bytes of the images' features stored",
    "evicted": "Objects evicted from this process's part of the store",
    "refused": "Records that the store did not take, because it was full or they were too large",
    "unstored": "Records of a process that only reads, because as many others store as the store has parts",
}
"""The counters, and what they count."""


class Artifacts(Outputs):
    """What one tokenizer process has of the store."""

    kind, what = "preprocess", "preprocessed media"

    def __init__(self, wanted: Settings, processor: Any, namespace: str) -> None:
        self._counters = _metrics()
        super().__init__(wanted, "cpu")
        self.wait_s, self._claims = wanted.wait_s, wanted.single_flight and self.stores
        self._processor, self._namespace = processor, namespace
        self._storing = Lock()
        self.plain = True
        """Whether all records had plain data so far."""

    def count(self, name: str, count: int = 1) -> None:
        """Count by the names in `FIGURES`; at once, since several threads do."""
        if (counter := self._counters.get(name)) is not None:
            counter.inc(count)

    async def take(self, entry: MediaArtifactInput, wait: float) -> Any:
        """Return the record; else a claim to make it, None if another process makes it, True if it is not shared."""
        key: Any = entry.artifact_key
        with suppress(ShmStoreError):  # whatever is wrong with the store, the process can make it
            if not self._claims:
                return self.find(entry) or True
            found = await self.reader.afind_or_claim(key, namespace=self._namespace, wait=wait)
            return (self._artifact(found, entry) or True) if isinstance(found, PinnedRef) else found
        return True

    def find(self, entry: MediaArtifactInput) -> Any:
        """Return the record if it is stored, else None."""
        with suppress(ShmStoreError):
            found = self.reader.find(entry.artifact_key, namespace=self._namespace)
            return found and self._artifact(found, entry)
        return None

    def _artifact(self, found: PinnedRef, entry: MediaArtifactInput) -> Any:
        with found, suppress(*_WRONG):
            try:
                name, fields = self.reader.get(found.ref)
            except ObjectBusyError:  # a writer was stopped; the image is processed here
                return None
            artifact: Any = self._known(name)(**fields)
            self._processor.validate_artifact(artifact, entry)
            if isinstance(artifact.feature, torch.Tensor):
                self.count("hits")
                return artifact
        self.count("wrong")
        if self._writer is not None:
            self._writer.delete(entry.artifact_key, namespace=self._namespace)
        self.warn(
            "store %s holds something other than preprocessed media under key %s: the image is processed again, and "
            "further cases are only counted, as wrong; look for another program that writes there",
            self._settings.store,
            entry.artifact_key,
        )
        return None

    def _known(self, name: str) -> Any:
        """Return the class of that name which the processor's module has for its records; LookupError if none."""
        for base in type(self._processor).__mro__:
            found = vars(sys.modules[base.__module__]).get(name)
            if isinstance(found, type) and dataclasses.is_dataclass(found):
                return found
        raise LookupError(name)

    def keep(self, artifact: Any) -> bool:
        """Store a record; return whether it can be found."""
        try:
            with self._storing:
                self.store(artifact.artifact_key, self._namespace, artifact.cache_value())
        except unless_interrupted(Exception) as error:  # of whatever kind: it is made
            self.plain = False
            self.warn("%s stay in SGLang's own cache: %s", self.what, error)
        with suppress(ShmStoreError):
            return self.reader.has(artifact.artifact_key, namespace=self._namespace)
        return False

    def _put(self, writer: ObjectStoreWriter, key: str, namespace: str, output: Any, claim: Claim | None) -> bool:
        name = type(output).__name__
        if self._known(name) is not type(output) or not output.has_feature:
            raise TypeError(f"a {name} has its tensors on a device, or is of another module")
        fields = {one.name: getattr(output, one.name) for one in dataclasses.fields(output)}
        try:
            writer.put(key, (name, fields), lease=False, kind=self.kind, namespace=namespace, unless_stored=True)
        except UnsupportedValueError as error:  # of a field; it is no problem of the store
            raise TypeError(error.message) from None
        self.count("stored_bytes", output.feature.nbytes)
        return False


@functools.cache
def _metrics() -> dict[str, Any]:
    return metrics("preprocess", FIGURES, {})


# ---- what SGLang calls


def _open(processor: Any) -> Artifacts | None:
    """Open the store; a problem is logged, and nothing is shared."""
    try:
        given, wanted = get_server_args(), settings(PREPROCESS)
        if get_serving().tokenizer_path != get_model().model_path:  # `given` is as it was given
            raise ValueError("the processor is not the model's (--tokenizer-path)")
        names = ("device", "tokenizer_mode", "trust_remote_code")
        scope = scope_of(given, process_model_config(), *names, processor=_loaded(processor))
        return None if wanted is None else Artifacts(wanted, processor, scope)
    except unless_interrupted(Exception) as error:  # of whatever kind: the process serves without it
        _log.warning("preprocessed media are not shared: %s", error)
        return None


def _loaded(processor: Any) -> str:
    """Return the settings that the image processor was loaded with: its files may be others by now."""
    images: Any = getattr(getattr(processor, "_processor", None), "image_processor", None)
    return str(images.to_json_string()) if hasattr(images, "to_json_string") else ""


async def _opened(processor: Any) -> Artifacts | None:
    """Open the store with the first image, in a thread: its memory is reserved then. No image waits long for it."""
    about = vars(processor)
    if "shmstore" not in about:
        about["shmstore"] = asyncio.create_task(asyncio.to_thread(_open, processor))
    if not about["shmstore"].done():
        await asyncio.wait({about["shmstore"]}, timeout=_OPENING)
    return about["shmstore"].result() if about["shmstore"].done() else None


def _cached(
    theirs: Callable[..., Any], processor: Any, key: str, content_digest: str, modality: Any, **more: Any
) -> Any:
    """Look into SGLang's own cache, and then into the store."""
    opening = vars(processor).get("shmstore")
    artifact, artifacts = theirs(processor, key, content_digest, modality, **more), opening and opening.done()
    if artifact is None and artifacts and (artifacts := opening.result()) is not None and artifacts.plain:
        return artifacts.find(MediaArtifactInput(content_digest, key, modality, None))
    return artifact


async def _compute(
    theirs: Callable[..., Awaitable[None]],
    processor: Any,
    misses: Sequence[Any],
    firsts: Any,
    snapshots: Any,
    previous: Any,
    resolved: dict[str, Any],
    modality: Any,
) -> None:
    """Take from the store what others have made or make; SGLang makes the rest. An error is for all who wait."""
    cache, left, waits = processor.mm_preprocess_cache, list(misses), False
    try:
        artifacts = await _opened(processor)
        if artifacts is None or not artifacts.plain:
            return await theirs(processor, misses, firsts, snapshots, previous, resolved, modality)
        until = time.monotonic() + artifacts.wait_s
        while left:
            make: list[Any] = []
            later: list[Any] = []
            with ExitStack() as claims:
                for miss in left:
                    digest = snapshots[firsts[miss.key]].content_digest
                    entry = MediaArtifactInput(digest, miss.key, modality, None)
                    wait = max(until - time.monotonic(), 0.0) if waits and not make else 0.0
                    got = await artifacts.take(entry, wait)
                    if got is None and time.monotonic() < until:
                        later.append(miss)
                    elif got is None or got is True or isinstance(got, Claim):
                        if isinstance(got, Claim):
                            claims.enter_context(got)
                        artifacts.count("unclaimed", got is None)
                        make.append(miss)
                    else:
                        resolved[miss.key] = got
                        cache.complete_miss(miss, got, size_bytes=-1)  # which keeps it out of SGLang's own cache
                if make:
                    await theirs(processor, make, firsts, snapshots, previous, resolved, modality)
                    artifacts.count("processed", len(make))
                for miss in make:
                    if await asyncio.to_thread(artifacts.keep, resolved[miss.key]):
                        cache.pop(miss.key)
            left, waits = later, True
    except BaseException as error:
        for miss in misses:
            if not miss.future.done():
                cache.fail_miss(miss, error)
        raise


@functools.cache
def install() -> None:
    """Register what begins with the first image, which `load_plugins` then applies; idempotent."""
    HookRegistry.register(f"{_MIXIN}._get_cached_artifact", _cached, HookType.AROUND)
    HookRegistry.register(f"{_MIXIN}._compute_cache_misses", _compute, HookType.AROUND)
