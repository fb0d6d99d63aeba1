"""An API server process: it opens its sender by the configuration, and does what it is told."""

from typing import Any

from shmstore.multimodal import MultiModalCacheConfig
from tests.multimodal.helpers import shm_sender, update
from tests.multimodal.worker import truth


def main(conn: Any, settings: MultiModalCacheConfig) -> None:
    """Answer (method, arguments) with what the method of the sender returns, until None comes."""
    with shm_sender(settings) as sender:
        conn.send((sender.writer.index, sender.writer.recovered, sender.handle))
        while (message := conn.recv()) is not None:
            method, *arguments = message
            if method == "request":  # as an engine does it
                mm_hashes, engine = arguments
                cached = sender.is_cached(mm_hashes)
                inputs = [
                    None if hit else (truth(mm_hash), [update(mm_hash)])
                    for mm_hash, hit in zip(mm_hashes, cached, strict=True)
                ]
                outputs = sender.get_and_update(inputs, mm_hashes)
                sent = [piece for piece, _ in outputs]
                sender.assign_group(sent, engine)
                conn.send((cached, outputs))
            elif method == "begin":
                begun = sender.begin(*arguments, wait=60)
                conn.send([*begun])
            elif method == "meet":
                begun = sender.begin(*arguments, wait=60)
                inputs = [None if hit else (truth(it), []) for it, hit in zip(*arguments, begun, strict=True)]
                sender.release([piece for piece, _ in sender.get_and_update(inputs, *arguments)])
                conn.send([*begun])
            elif method == "stats":
                conn.send(sender.writer.stats())
            else:
                conn.send(getattr(sender, method)(*arguments))
