"""A store in the `/metrics` of an engine of several processes, whichever of them is asked: sums over all its writers.

Such a `/metrics` shows what each process has written into files (`MultiProcessCollector`), and no collector of a
process. vLLM has it with several API servers, and SGLang always.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from shmstore.errors import ShmStoreError
from shmstore.metrics import store_totals


@functools.cache
def _in_use() -> Gauge:
    text = "1 if an engine's cache goes through a store of shmstore, 0 if shmstore stays out for this reason."
    return Gauge("shmstore_in_use", text, ["reason"], multiprocess_mode="mostrecent")


def show_use(reason: str = "") -> None:
    """Show in `/metrics` that shmstore is in use, or why it stays out."""
    _in_use().labels(reason).set(not reason)


def show_totals(name: str) -> None:
    """Let `MultiProcessCollector` show this store, too, read at each scrape; in the place of the last one."""
    theirs = getattr(MultiProcessCollector.collect, "__wrapped__", MultiProcessCollector.collect)

    @functools.wraps(theirs)
    def with_totals(self: MultiProcessCollector) -> Iterator[Metric]:
        yield from theirs(self)
        with suppress(ShmStoreError, OSError):  # a store that was removed has no figures
            yield from store_totals(name)

    MultiProcessCollector.collect = with_totals  # type: ignore[method-assign]
