"""Fixtures of the benchmarks, which measure a figure and its reference interleaved in one session."""

import time
import timeit
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

ROUND_S = 100e-6
ROUNDS = 2000


class Figure:
    """Measures one figure of the table with pytest-benchmark, and its reference between the rounds."""

    def __init__(self, benchmark: Any) -> None:
        self._benchmark = benchmark

    def alone(self, name: str, operation: Callable[[], Any], *, limit_us: float) -> None:
        """Time `operation` by itself, against an absolute limit in microseconds.

        A round has many short operations, because reading the clock takes as long as asking whether a key is cached.
        """
        self._benchmark.extra_info.update(figure=name, kind="time", limit=limit_us)
        estimate = min(timeit.repeat(operation, number=5, repeat=5)) / 5
        self._benchmark.pedantic(operation, iterations=max(1, round(ROUND_S / estimate)), rounds=ROUNDS)

    def rounds(
        self, name: str, operation: Callable[[], Any], *, limit_us: float, rounds: int, setup: Callable[[], Any]
    ) -> None:
        """Time `operation` with one call in each round, and `setup` before each call."""
        self._benchmark.extra_info.update(figure=name, kind="time", limit=limit_us)
        self._benchmark.pedantic(operation, setup=setup, rounds=rounds, warmup_rounds=min(rounds, 5))

    def against(
        self,
        name: str,
        operation: Callable[[], Any],
        reference: Callable[[], Any],
        *,
        rounds: int,
        ratio: float | None = None,
        difference_us: float | None = None,
        setup: Callable[[], Any] | None = None,
        reference_setup: Callable[[], Any] | None = None,
    ) -> None:
        """Time `operation` and `reference` in turn; the limit applies to the ratio or difference of the medians."""
        times: list[float] = []

        def between() -> None:
            if reference_setup:
                reference_setup()
            start = time.perf_counter()
            reference()
            times.append(time.perf_counter() - start)
            if setup:
                setup()

        self._benchmark.pedantic(operation, setup=between, rounds=rounds, warmup_rounds=5)
        self._benchmark.extra_info.update(
            figure=name,
            kind="ratio" if ratio is not None else "difference",
            limit=ratio if ratio is not None else difference_us,
            reference_us=median(times) * 1e6,
        )

    def value(self, name: str, value: float, *, limit: float) -> None:
        """Record a figure that is not a time."""
        self._benchmark.extra_info.update(figure=name, kind="value", limit=limit, value=value)
        self._benchmark.pedantic(lambda: None)

    def measured(self, name: str, value: float, *, limit: float, reference: float | None = None) -> None:
        """Record microseconds that an external program has measured, and those of its reference."""
        self._benchmark.extra_info.update(figure=name, kind="measured", limit=limit, value=value, other=reference)
        self._benchmark.pedantic(lambda: None)


@pytest.fixture
def figure(benchmark: Any) -> Figure:
    return Figure(benchmark)
