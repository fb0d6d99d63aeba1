"""Who shares a store: the API servers of one `vllm serve`, and the engines to which they send.

With several API servers or engines vLLM has no cache between processes, because a mirror of what one server has sent to
one engine would be wrong for the others. A reference is as good in any process of its host, so a store serves them all.

One API server creates the store before it starts its engines, which find its handle in their environment. Of several,
none is an engine's parent, and nobody is first. So the process at the top chooses a name, and all below it know it: the
first API server creates the store, the others join it, and a worker attaches when the first reference comes. When vLLM
stops, it kills its API servers before they have closed the store. So the process at the top removes it at its end.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import secrets
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmstore.errors import LayoutMismatchError, ShmStoreError
from shmstore.files import PREFIX
from shmstore.inspect.inspector import StoreInspector
from shmstore.integrations.encoder import KIND
from shmstore.places import folder_of

STORE = "SHMSTORE_VLLM_STORE"
"""The variable with a name for the store, which then outlives its servers."""
HANDLE = "SHMSTORE_VLLM_HANDLE"
"""The variable in which an API server leaves the store's handle for the engines that it starts."""
TIER = "SHMSTORE_TIER"
"""The variable with the URL of a tier, in which API servers of other hosts find what this one has processed."""
WAIT = "SHMSTORE_VLLM_WAIT"
"""The variable with the seconds for which an API server waits for an item that another one processes."""
SHARE_UUIDS = "SHMSTORE_VLLM_SHARE_UUIDS"
"""The variable that says whether names that clients have chosen mean the same in later runs and on other hosts."""
RUN = "SHMSTORE_VLLM_RUN"
"""The variable with what only the processes of one `vllm serve` share: the name of their store if none was chosen."""


@functools.cache
def agree() -> None:
    """Choose a name for this process and those that it will start, unless it was started by one that has; once."""
    if multiprocessing.parent_process() is None or RUN not in os.environ:  # a parent may not use vLLM
        os.environ[RUN] = name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        os.environ.pop(HANDLE, None)  # of another engine, whose process has started this one
        atexit.register(_remove, name, os.getpid())


def _remove(name: str, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        with suppress(OSError):  # it was removed before
            Path(folder_of(), name).unlink()  # also while a worker is still ending: it needs no name


def store_name() -> str:
    """Return the name of the store that API servers share."""
    return os.environ.get(STORE) or os.environ[RUN]


def check_not_of_encoder(name: str) -> None:
    """Raise LayoutMismatchError for a store of encoder outputs, which a processor cache would replace."""
    kinds: Container[str] = ()
    with suppress(ShmStoreError, OSError), StoreInspector.open(name) as inspector:  # else opening it says more
        kinds = inspector.kinds()
    if KIND in kinds:
        raise LayoutMismatchError(
            f"store {name!r} has encoder outputs, so it cannot be the processor cache",
            hint=f"give another {STORE}; or end its engines, and remove it by `shmstore gc {name} --yes --force`",
        )


def engines(parallel: Any) -> int:
    """Return to how many engines one API server sends."""
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


def cache_type(theirs: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Wrap vLLM's choice of the caches: where type `shm` is wanted and a store can serve, it is `shm`.

    API servers and workers ask, each with its own configuration. A worker may be told `shm` where its API server was
    not: then nobody sends it a reference.
    """

    @functools.wraps(theirs)
    def ours(vllm_config: Any) -> str | None:
        found = theirs(vllm_config)
        if found is not None and _served(vllm_config.parallel_config):
            wanted = vllm_config.model_config.get_multimodal_config().mm_processor_cache_type
            return "shm" if wanted == "shm" else found
        return found

    return ours


def _served(parallel: Any) -> bool:
    """Return whether all engines of the API servers, and their workers, are on this host and stay as many."""
    return (
        engines(parallel) == parallel.data_parallel_size_local
        and parallel.nnodes == 1
        and "ray" not in (parallel.data_parallel_backend, parallel.distributed_executor_backend)
        and not parallel.enable_elastic_ep
    )
