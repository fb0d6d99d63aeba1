"""The scheduler ranks of one engine without its model: SGLang's own socket, broadcast, barrier and vote.

`python -m tests.sglang.ranks RANK SIZE RENDEZVOUS SOCKET READ` is one rank. It prints a line of JSON for each message:
for each tensor of the request what the function READ says of it, or the type of what is there instead of tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def patch(rank: int, size: int) -> SimpleNamespace:
    """Have SGLang's modules and ours see these ranks of a new engine, as a launch would have published them."""
    from sglang.srt.managers import mm_utils
    from sglang.srt.managers.scheduler_components import request_receiver

    from shmstore.integrations.sglang import pointer, sender

    group = SimpleNamespace(rank=rank, ranks=list(range(size)), cpu_group=None)
    parallel = SimpleNamespace(dp_size=1, attn_dp_enabled=False, tp_size=size, tp_rank=rank, tp_group=group)
    for module in (request_receiver, pointer, sender):
        vars(module)["get_parallel"] = lambda: parallel
    engine = SimpleNamespace(model_path="model", revision=None, mm_process_config=None, tokenizer_worker_num=1)
    vars(sender)["get_server_args"] = lambda: engine
    vars(mm_utils)["_is_default_tensor_transport"] = False
    vars(mm_utils)["get_serving"] = lambda: SimpleNamespace(skip_tokenizer_init=False)
    return parallel


def total(value: Any) -> float:
    return float(value.sum())


def seen(value: Any) -> str:
    """Return a tensor's type, shape and digest, and then write to it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    raw = value.contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]
    raw.fill_(255)  # it is this rank's own
    return f"{value.dtype} {list(value.shape)} {digest}"


def main(rank: int, size: int, rendezvous: str, address: str, read: Callable[[Any], Any]) -> None:
    import torch.distributed as dist
    import zmq
    from sglang.srt.managers.io_struct import sock_recv
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import broadcast_pyobj

    load_plugins()
    parallel = patch(rank, size)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    socket = zmq.Context().socket(zmq.PULL)
    if rank == 0:
        socket.bind(address)
    receiver = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True))
    print(json.dumps("ready"), flush=True)
    while True:
        got = [sock_recv(socket)] if rank == 0 else []
        got = broadcast_pyobj(got, rank, parallel.tp_group.cpu_group, src=0)
        SchedulerRequestReceiver._finalize_shm_features(receiver, got)
        (request,) = got
        items = getattr(request.mm_inputs, "mm_items", None)
        features = [part for item in items for part in listed(item.feature)] if items is not None else None
        print(
            json.dumps(type(request.mm_inputs).__name__ if features is None else list(map(read, features))), flush=True
        )


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], {"seen": seen, "total": total}[sys.argv[5]])
