"""Where the plug-in meets vLLM: what it must find there, and what it changes.

Known are 0.13.0, 0.16.0, 0.25.0 and 0.32.0. A method that our classes do not have, another parameter, or another field
may mean anything, so the plug-in goes on only if it knows them all.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import vllm.multimodal.cache as _cache
import vllm.multimodal.registry as _registry
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor

try:
    import vllm.multimodal.cache.factories as _factories
except ImportError:  # 0.13 has them beside the caches, others in the registry
    _factories = _registry if hasattr(_registry.MultiModalRegistry, "processor_cache_from_config") else _cache

from shmstore.integrations.vllm import receiver, sender, shared

__all__ = ["difference", "install"]

_CHOICE = "_get_cache_type"
"""The function that the factories ask; 0.13 has it not, and then the store serves one engine."""
_SENDER, _RECEIVER = "ShmObjectStoreSenderCache", "ShmObjectStoreReceiverCache"
_OWNER = getattr(_factories, "MultiModalRegistry", _factories)
_OURS = {_SENDER: sender.SenderCache, _RECEIVER: receiver.ReceiverCache}
_INHERITED = {"is_cached", "get_and_update", "cache_if_fits"}
"""Methods of vLLM's base classes that work on ours as they are."""
_OUTPUT = {"request_id", "new_token_ids", "pooling_output", "finished", "finish_reason"}
"""What the wrapped methods read of an output."""
_METHODS = {
    "add_request": ("self", "request", "prompt", "parent_req", "request_index", "queue"),
    "abort_requests": ("self", "request_ids"),
    "process_outputs": ("self", "engine_core_outputs"),
}
"""How the parameters of the wrapped methods of `OutputProcessor` begin."""


def difference() -> str | None:
    """Return the first difference between this vLLM and those that are known, or None."""
    for name, ours in _OURS.items():
        theirs, factory = getattr(_cache, name), "processor" if name == _SENDER else "worker_receiver"
        if name not in getattr(_OWNER, f"{factory}_cache_from_config").__code__.co_names:
            return f"its factory does not use {name}"
        if _parameters(theirs) != _parameters(ours):
            return f"{name}{inspect.signature(theirs)} has other parameters"
        base = ours.__mro__[1]
        for method in (name for name in dir(base) if not name.startswith("_")):
            if method not in vars(ours) and method not in _INHERITED:
                return f"{base.__name__}.{method} is new"
            if method in vars(ours) and _parameters(getattr(base, method)) != _parameters(getattr(ours, method)):
                return f"{base.__name__}.{method} has other parameters"
    for method, known in _METHODS.items():
        if _parameters(getattr(OutputProcessor, method))[: len(known)] != known:
            return f"OutputProcessor.{method} has other parameters"
    if _parameters(AsyncMPClient._send_input) != ("self", "request_type", "request", "engine"):
        return "AsyncMPClient._send_input has other parameters"
    if "request_states" not in OutputProcessor.__init__.__code__.co_names:
        return "OutputProcessor has no request_states"
    if _fields(MultiModalFieldElem) not in ({"data", "field"}, {"modality", "key", "data", "field"}):
        return "MultiModalFieldElem has other fields"
    if not {"data", "identifier"} <= _fields(MultiModalFeatureSpec):
        return "MultiModalFeatureSpec has other fields"
    if missing := _OUTPUT - set(dir(EngineCoreOutput)):
        return f"EngineCoreOutput has no {missing.pop()}"
    return None


def install() -> None:
    """Put our classes where vLLM's factories look theirs up; idempotent. A sender then follows requests."""
    shared.agree()
    receiver.policy()  # a wrong setting is an error now, in the API server, and not later in a worker
    for name, ours in _OURS.items():
        setattr(_factories, name, ours)
    if hasattr(_factories, _CHOICE) and not hasattr(getattr(_factories, _CHOICE), "__wrapped__"):
        setattr(_factories, _CHOICE, shared.cache_type(getattr(_factories, _CHOICE)))


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}
