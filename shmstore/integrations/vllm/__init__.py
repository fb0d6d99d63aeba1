"""The plug-in for vLLM: its multi-modal cache of type `shm` on a store of shmstore.

vLLM calls `register` in each of its processes, through the entry point group ``vllm.general_plugins``. With
``--mm-processor-cache-type shm`` the API server then puts each item once into a store, and sends a reference. A lease
keeps the item until the request is over, however often and by however many workers it is read.

    SHMSTORE_VLLM       1 (default); 0: stay out; strict: fail where the plug-in would stay out
    SHMSTORE_VLLM_STORE a name for the store, which then outlives its server; the next one with this name takes it over
    SHMSTORE_VLLM_READ  copy (default), views or private: how a worker reads; see `receiver`
    SHMSTORE_VLLM_WAIT  seconds (1) for which an API server waits for an item that another one processes
    SHMSTORE_VLLM_SHARE_UUIDS  0 (default) or 1: whether names that clients chose mean the same to all servers
    SHMSTORE_TIER       the URL of a tier, in which API servers of other hosts find what this one has processed

`register` first compares vLLM's version, and the calls between vLLM and the plug-in, with what is known (`compare`). If
they differ, it changes nothing and logs one line.
"""

import logging
import os

from shmstore.errors import unless_interrupted

__all__ = ["register"]

_log = logging.getLogger("vllm.shmstore")  # a child of vLLM's own logger, so that its settings apply
logging.getLogger("shmstore").parent = _log  # and so to what the store says, which else nobody would see


def register() -> None:
    """Put the caches of shmstore in the place of vLLM's two classes for shared memory; idempotent.

    Raises RuntimeError if the environment says ``SHMSTORE_VLLM=strict`` and vLLM is not as the plug-in knows it, and
    ValueError for another value of that variable than 0, 1 and strict.
    """
    wanted = os.environ.get("SHMSTORE_VLLM", "1")
    if wanted not in ("0", "1", "strict"):
        raise ValueError(f"SHMSTORE_VLLM must be 0, 1 or strict, not {wanted!r}")
    if wanted == "0":
        return
    from shmstore.integrations.vllm import compare  # here: it is also a command, which this module must not load

    try:
        problem = compare.difference(compare.CACHES)
        if problem is None:
            from shmstore.integrations.vllm import seams  # not before: it imports what was compared
    except unless_interrupted(Exception) as error:  # whatever another vLLM makes of our questions
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        seams.install()
    else:
        from shmstore.integrations.totals import show_use

        show_use(problem)
        stay_out("shmstore stays out, and vLLM uses its own caches", problem)


def stay_out(what: str, why: object) -> None:
    """Log that something of vLLM's own is used, and why; with ``SHMSTORE_VLLM=strict`` that is a RuntimeError."""
    if os.environ.get("SHMSTORE_VLLM") == "strict":
        raise RuntimeError(f"{what}: {why} (hint: without SHMSTORE_VLLM=strict this is only logged)")
    _log.warning("%s: %s", what, why)
