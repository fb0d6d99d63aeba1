"""Where the plug-in meets vLLM: the names that it changes."""

from __future__ import annotations

import vllm.multimodal.cache.factories as _factories
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer

from shmstore.integrations.vllm import names, receiver, requests, sender, shared


def install() -> None:
    """Put our classes where vLLM's factories look theirs up; idempotent. A sender then follows requests."""
    shared.agree()
    receiver.policy()  # a wrong setting is an error now, in the API server, and not later in a worker
    sender.wait_seconds()
    names.number_by_run(BaseRenderer)
    if not sender.share_uuids():
        names.hash_by_run(ProcessorInputs)
    requests.follow_refusals(BaseRenderer)
    _factories.ShmObjectStoreSenderCache = sender.SenderCache
    _factories.ShmObjectStoreReceiverCache = receiver.ReceiverCache
    if not hasattr(_factories._get_cache_type, "__wrapped__"):
        _factories._get_cache_type = shared.cache_type(_factories._get_cache_type)
