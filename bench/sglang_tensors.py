"""A tensor of 17 MiB to two ranks, with the plug-in and by SGLang's own file, in turn; prints medians.

`python -m bench.sglang_tensors` in the environment of `make test-sglang`. SGLang's own functions wrap, send, broadcast
and vote; the ranks are processes that read all of the tensor.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROUNDS = 40
SHAPE = 3790, 1176
SAMPLES = 3


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    done = call()
    return 1e3 * (time.perf_counter() - begun), done


def main(folder: Path) -> None:
    os.environ.setdefault("SHMSTORE_SGLANG_GB", "0.25")
    import torch
    from sglang.srt.managers import mm_utils
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from tests.sglang.harness import ranks_of, request, send
    from tests.sglang.ranks import patch

    patch(0, 2)
    ours = mm_utils.ShmPointerMMData
    stock = ours.__mro__[1]
    names = ("new: wrap", "new: until both have read it", "again: wrap", "again: until both have read it", "n = 3")
    taken: dict[type, list[list[float]]] = {cls: [[] for _ in names] for cls in (stock, ours)}

    with ranks_of(folder, 2, "total") as ranks:

        def through(tensor: torch.Tensor) -> tuple[float, float]:
            wrap, made = milliseconds(lambda: request(tensor))

            def send_and_wait() -> list[Any]:
                send(ranks, made)
                return ranks.answers()

            rest, said = milliseconds(send_and_wait)
            assert [[float(tensor.sum())]] * 2 == said
            return wrap, wrap + rest

        for number in range(ROUNDS):
            for cls in (stock, ours) if number % 2 else (ours, stock):
                vars(mm_utils)["ShmPointerMMData"] = cls
                tensor = torch.full(SHAPE, float(number))
                new, *more = (through(tensor) for _ in range(1 + SAMPLES))  # the first one fills the prefix cache
                figures = (*new, *more[0], new[1] + sum(total for _, total in more))
                for row, figure in zip(taken[cls], figures, strict=True):
                    row.append(figure)
    print("| | SGLang's files, ms | store, ms | times |\n|---|---|---|---|")
    for place, name in enumerate(names):
        theirs, mine = (statistics.median(taken[cls][place][ROUNDS // 4 :]) for cls in (stock, ours))
        print(f"| {name} | {theirs:.2f} | {mine:.2f} | {theirs / mine:.1f} |")


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        main(Path(made))
