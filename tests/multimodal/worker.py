"""A worker process: reads the items that the sender has sent, checks every byte, and answers at its own pace."""

import random
import time
from typing import Any

import torch

from shmstore import StoreHandle
from shmstore.multimodal import MultiModalBatchedField, MultiModalCacheConfig, MultiModalFieldElem, MultiModalKwargsItem
from tests.multimodal.helpers import features, shm_worker


def truth(mm_hash: str) -> MultiModalKwargsItem:
    """Return the contents for this hash, whose last part is the size."""
    seed, size = (int(part) for part in mm_hash.split(":"))
    data = torch.arange(size, dtype=torch.int32).mul_(2 * seed + 1).add_(seed).to(torch.uint8)
    elems = [
        MultiModalFieldElem("image", "pixels", data, MultiModalBatchedField()),
        MultiModalFieldElem("image", "seed", torch.tensor([seed, size]), MultiModalBatchedField()),
    ]
    return MultiModalKwargsItem.from_elems(elems)


def main(conn: Any, settings: MultiModalCacheConfig, rank: int, handle: StoreHandle) -> None:
    """Answer (request, every item right) for each request until None comes."""
    torch.set_num_threads(1)  # of several processes on few cores
    rng = random.Random(rank)
    with shm_worker(settings, rank, handle) as cache:
        conn.send("attached")
        while (message := conn.recv()) is not None:
            request, mm_hashes, sent = message
            batch = cache.get_and_update_features(features(mm_hashes, sent))
            time.sleep(rng.random() * 0.002 * (rank + 1))  # the model's step takes a different time in each worker
            right = all(truth(feature.identifier) == feature.data for feature in batch)
            del batch, sent
            conn.send((request, right))
        conn.send("done")
