"""Where the plug-in meets SGLang: the class of what travels in the place of a tensor.

It has the name and the module of SGLang's class, by which SGLang's messages know it. A pointer to a stored tensor has
a reference and the handle of its store. A scheduler without the plug-in takes such a state for that of a file, and
fails the request: no file can have its name. Each hop decodes a pointer, so nothing is opened before `materialize`,
which alone raises: all ranks must finish the broadcast that decodes it, to vote on its request.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sglang
import torch
from sglang.srt.managers import mm_utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from shmstore.errors import SharedMemoryError, ShmStoreError
from shmstore.files import PREFIX
from shmstore.integrations.sglang import ENCODER, RUN, STORE
from shmstore.integrations.sglang.sender import has_replicas, sender
from shmstore.multimodal.values.hashing import hash_item
from shmstore.refs import ObjectRef, StoreHandle
from shmstore.store import LeasedRef, ObjectStoreReader, ObjectStoreWriter

_log = logging.getLogger("sglang.shmstore")

TESTED = ("0.5.23",)
"""The versions that the tests ran engines of."""
TARGET = "sglang.srt.managers.mm_utils.ShmPointerMMData"
DISPATCH = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
HASH = "sglang.srt.managers.schedule_batch.MultimodalDataItem.set_pad_value"
SEVERAL = "sglang.srt.managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer"
PACKAGE, OURS = "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "shmstore.integrations.sglang.tokenizers"
"""The variable with a package that each tokenizer process imports, and ours."""
NO_FILE = "shmstore/this process lacks the plug-in"
"""The name of a file that cannot be: shared memory has no folders."""

_encoded: list[ShmPointerMMData] | None = None  # while a message is encoded: the pointers in it
_readers: dict[str, ObjectStoreReader] = {}


class ShmPointerMMData(mm_utils.ShmPointerMMData):  # type: ignore[misc]
    """A pointer to a tensor in a store; without a reference it is SGLang's, with a file."""

    _ref: ObjectRef | None = None
    _store = ""
    _unsent: ObjectStoreWriter | None = None
    """Who ends the lease if the pointer is not sent."""
    _leased: LeasedRef | None = None
    """The lease of one of several replicas, which ends with the request."""
    shm_name = NO_FILE
    shape = dtype = precomputed_hash = _shm_handle = _materialization_error = tensor = None

    def __init__(self, tensor: torch.Tensor, precomputed_hash: int | None = None) -> None:
        handed_out = sender.hand_out(tensor, precomputed_hash)
        if handed_out is None:
            super().__init__(tensor, precomputed_hash)
            return
        ref, self._unsent, self._leased = handed_out
        _follow_messages()
        self.__setstate__(
            {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "precomputed_hash": precomputed_hash,
                "shmstore": [ref.to_bytes(), self._unsent.handle.to_json()],
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if self._ref is not None:
            state["shmstore"] = [self._ref.to_bytes(), self._store]
            if _encoded is not None:
                _encoded.append(self)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            if "shmstore" not in state:
                super().__setstate__(state)
                return
            packed, self._store = state["shmstore"]
            self._ref = ObjectRef.from_bytes(packed)
            self.shape, self.dtype = torch.Size(state["shape"]), state["dtype"]
            self.precomputed_hash = state.get("precomputed_hash")
        except (KeyError, TypeError, ValueError) as error:
            self._materialization_error = f"the state of a pointer is malformed: {type(error).__name__}: {error}"

    def materialize(self) -> Any:
        """Return the tensor, writable and private to this process, and acknowledge the reference.

        RuntimeError for what is not the tensor that the pointer describes; then all ranks reject the request.
        """
        if self._ref is None:
            return super().materialize()
        try:
            try:
                tensor = _reader(self._store).get(self._ref, private=True)
            except SharedMemoryError:  # it cannot be mapped
                tensor = _reader(self._store).get(self._ref, copy=True)
        finally:
            self.close_and_unlink()
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            problem = f"the store has something else than a tensor of {self.dtype} and {self.shape}"
            raise RuntimeError(self._materialization_error or problem)
        return tensor

    def close_and_unlink(self) -> None:
        """Acknowledge the reference without reading; idempotent."""
        if self._ref is None:
            super().close_and_unlink()
            return
        with suppress(
            ShmStoreError, OSError, TypeError, ValueError
        ):  # the store was removed, not for this rank, or none
            _reader(self._store).release(self._ref)

    def __del__(self) -> None:
        if self._unsent is not None and self._ref is not None:
            with suppress(ShmStoreError):
                self._unsent.cancel(self._ref)
        super().__del__()


# How messages know it.
ShmPointerMMData.__module__ = mm_utils.__name__
ShmPointerMMData.__qualname__ = mm_utils.ShmPointerMMData.__qualname__


def _reader(store: str) -> ObjectStoreReader:
    if store not in _readers:
        rank = None if has_replicas() else get_parallel().tp_rank
        _readers[store] = ObjectStoreReader.attach(StoreHandle.from_json(store), rank, finds_only=rank is None)
    return _readers[store]


def _dispatch(send: Callable[..., Any], manager: Any, message: Any) -> Any:
    """Send a message; only if that succeeds, the leases of its pointers are the ranks' affair.

    A message may be refused while it is encoded, for a text without UTF-8 or a number too large in any of its fields.
    """
    global _encoded
    sent: list[ShmPointerMMData] = []
    _encoded = sent
    try:
        done = send(manager, message)
        for pointer in sent:
            pointer._unsent = None
        if leases := [pointer._leased for pointer in sent if pointer._leased is not None]:
            for one in getattr(message, "batch", [message]):
                if (state := manager.rid_to_state.get(one.rid)) is not None:  # else the request is over already
                    vars(state).setdefault("shmstore", []).extend(leases)
        return done
    finally:
        _encoded = None


@functools.cache
def _follow_messages() -> None:
    """Wrap how a tokenizer process sends; only here, since no other process has a `TokenizerManager`."""
    HookRegistry.register(DISPATCH, _dispatch, HookType.AROUND)
    HookRegistry.apply_hooks()


def _set_pad_value(hash_it: Callable[..., None], item: Any) -> None:
    """Note a tensor whose hash SGLang makes itself, and if encoder outputs are shared let the hash cover the grid, too.

    SGLang's covers only the bytes, which a wide picture and a tall one of the same blocks have in common.
    """
    given = item.pad_value is not None or item.hash is not None
    hash_it(item)
    if not given:
        if os.environ.get(ENCODER) and item.model_specific_data:
            with suppress(TypeError, ValueError):  # it has something else than plain data
                item.set_hash(int(hash_item([item.hash, item.model_specific_data], "sha256")[:16], 16))
        if isinstance(item.feature, torch.Tensor):
            sender.hashed[item.feature] = True


def _share(*_: Any, **__: Any) -> None:
    """Have the tokenizer processes that are about to start load plug-ins, and share a store."""
    os.environ.setdefault(RUN, f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
    if os.environ.setdefault(PACKAGE, OURS) != OURS:
        _log.warning("tokenizer processes send SGLang's own files, because %s is %s", PACKAGE, os.environ[PACKAGE])


def install_on_top() -> None:
    """Register what is for the process that starts all others."""
    HookRegistry.register(SEVERAL, _share, HookType.BEFORE)


@functools.cache
def install() -> None:
    """Register our class in the place of SGLang's, which `load_plugins` then puts there; idempotent."""
    HookRegistry.register(TARGET, ShmPointerMMData, HookType.REPLACE)
    if os.environ.get(STORE) or os.environ.get(ENCODER):
        HookRegistry.register(HASH, _set_pad_value, HookType.AROUND)
    if (version := sglang.__version__.partition("+")[0]) not in TESTED:
        _log.warning("shmstore was not tested with SGLang %s, but with %s", version, ", ".join(TESTED))
