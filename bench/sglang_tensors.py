"""A tensor of 17 MiB through SGLang's messages, with the plug-in and by SGLang's own file, in turn; prints medians.

In the environment of `make test-sglang`: `python -m bench.sglang_tensors`. One process is tokenizer and rank: it wraps,
encodes, decodes, and reads all of the tensor.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 40
SHAPE = 3790, 1176


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    done = call()
    return 1e3 * (time.perf_counter() - begun), done


def main() -> None:
    os.environ.setdefault("SHMSTORE_SGLANG_GB", "0.25")
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from shmstore.integrations.sglang import pointer
    from tests.sglang.ranks import patch

    patch(0, 1)
    ours = pointer.ShmPointerMMData
    stock = ours.__mro__[1]
    names = ("new: wrap", "new: until it is read", "again: wrap", "again: until it is read")
    taken: dict[type, list[list[float]]] = {cls: [[] for _ in names] for cls in (stock, ours)}

    def through(cls: type, tensor: torch.Tensor) -> tuple[float, float]:
        wrap, sent = milliseconds(lambda: cls(tensor))
        state = pickle.dumps(sent.__getstate__())

        def read() -> float:
            got = cls.__new__(cls)
            got.__setstate__(pickle.loads(state))
            return float(got.materialize().sum())

        rest, _ = milliseconds(read)
        return wrap, wrap + rest

    for number in range(ROUNDS):
        for cls in (stock, ours) if number % 2 else (ours, stock):
            tensor = torch.full(SHAPE, float(number))
            for place in (0, 2):
                for offset, value in enumerate(through(cls, tensor)):
                    taken[cls][place + offset].append(value)
    print("| | SGLang's file, ms | store, ms | times |\n|---|---|---|---|")
    for row, name in enumerate(names):
        theirs, mine = (statistics.median(taken[cls][row][ROUNDS // 4 :]) for cls in (stock, ours))
        print(f"| {name} | {theirs:.2f} | {mine:.2f} | {theirs / mine:.1f} |")


if __name__ == "__main__":
    main()
