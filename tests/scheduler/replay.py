"""Replays recorded traces: each line is one operation with the answer it must give."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmstore.scheduler import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    EncoderCacheManager,
    KVCacheBlocks,
    Request,
)
from tests.scheduler.helpers import features, manager

UNLIMITED = 1 << 60


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


class Replayer:
    """One trace: what a ``cfg`` line builds, and an answer for each line after it."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        groups = [
            (g["type"], g["block_size"], g.get("window") or g.get("chunk") or g.get("spec_blocks") or 0)
            for g in cfg["groups"]
        ]
        self.caching = cfg["caching"]
        self.kv = manager(
            cfg["num_blocks"],
            *groups,
            hash_block_size=cfg["hash_block_size"],
            enable_caching=cfg["caching"],
            use_eagle=cfg["eagle"],
            log_stats=True,
            enable_kv_cache_events=cfg["events"],
            free_order="tail",
            int_event_hashes=True,
        )
        self.hasher = BlockHasher(cfg["hash_block_size"], cfg["hash"], extra_keys="flat")
        self.encoder = EncoderCacheManager(cfg["encoder_cache"])
        self.requests: dict[str, Request] = {}
        self.found: dict[str, tuple[KVCacheBlocks, int]] = {}

    def answer(self, line: dict[str, Any]) -> Any:
        return getattr(self, "op_" + line["op"])(line)

    def op_req(self, a: dict[str, Any]) -> Any:
        self.requests[a["id"]] = made = Request(
            a["id"],
            a["tokens"],
            block_hasher=self.hasher if self.caching else None,
            mm_features=features(*a["mm"]),
            cache_salt=a["salt"],
            lora_name=a["lora"][0] if a["lora"] else None,
            lora_id=a["lora"][1] if a["lora"] else None,
            skip_reading_prefix_cache=a["skip"],
        )
        return [block_hash.hex() for block_hash in made.block_hashes[-1:]]

    def op_lookup(self, a: dict[str, Any]) -> Any:
        self.found[a["id"]] = blocks, n = self.kv.get_computed_blocks(self.requests[a["id"]])
        return [list(blocks.get_block_ids()), n]

    def op_alloc_rest(self, a: dict[str, Any]) -> Any:
        req, (blocks, n) = self.requests[a["id"]], self.found[a["id"]]
        new = min(a["at_most"], req.num_tokens - n)
        got = self.kv.allocate_slots(req, new, n, blocks, num_lookahead_tokens=a["lookahead"])
        if got is None:
            return None
        req.num_computed_tokens = n + new
        return [n, new, list(got.get_block_ids())]

    def op_step(self, a: dict[str, Any]) -> Any:
        req = self.requests[a["id"]]
        if not self.kv.get_block_ids(a["id"])[0]:
            return "not running"
        if req.num_computed_tokens == req.num_tokens:
            req.append_output_token_ids(a["tok"])
        n = min(a["chunk"], req.num_tokens - req.num_computed_tokens)
        got = self.kv.allocate_slots(req, n, num_lookahead_tokens=a["lookahead"])
        if got is None:
            return None
        req.num_computed_tokens += n
        return [n, list(got.get_block_ids())]

    def op_common(self, a: dict[str, Any]) -> Any:
        return self.kv.get_num_common_prefix_blocks(a["id"])

    def op_free(self, a: dict[str, Any]) -> Any:
        return self.kv.free(self.requests[a["id"]])

    def op_evict(self, a: dict[str, Any]) -> Any:
        return self.kv.evict_blocks(a["ids"])

    def op_reset(self, a: dict[str, Any]) -> Any:
        return self.kv.reset_prefix_cache()

    def op_stats(self, a: dict[str, Any]) -> Any:
        s = self.kv.make_prefix_cache_stats()
        assert s is not None
        return [s.reset, s.requests, s.queries, s.hits, s.preempted_requests, s.preempted_queries, s.preempted_hits]

    def op_events(self, a: dict[str, Any]) -> Any:
        shown: list[Any] = []
        for event in self.kv.take_events():
            match event:
                case BlockStored(hashes, parent, tokens, size, lora_id, medium):
                    shown.append(["BlockStored", hashes, parent, tokens, size, lora_id, medium])
                case BlockRemoved(hashes, medium):
                    shown.append(["BlockRemoved", hashes, medium])
                case AllBlocksCleared():
                    shown.append(["AllBlocksCleared"])
        return shown

    def op_state(self, a: dict[str, Any]) -> Any:
        pool = self.kv.block_pool
        return {
            "free": pool.free_block_ids(),
            "ref": {str(block_id): count for block_id, count in pool.ref_counts().items()},
            "hashed": pool.cached_block_ids(),
            "keys": pool.num_cached_keys,
            "usage": self.kv.usage,
        }

    def op_enc_step(self, a: dict[str, Any]) -> Any:
        req, i = self.requests[a["id"]], a["i"]
        if self.encoder.check_and_update_cache(req, i):
            return "hit"
        if not self.encoder.can_allocate(req, i, UNLIMITED, 0):
            return "no"
        self.encoder.allocate(req, i)
        return "alloc"

    def op_e_free(self, a: dict[str, Any]) -> Any:
        return self.encoder.free(self.requests[a["id"]])

    def op_e_freed(self, a: dict[str, Any]) -> Any:
        return self.encoder.get_freed_mm_hashes()

    def op_e_state(self, a: dict[str, Any]) -> Any:
        return {
            "free": self.encoder.num_free_slots,
            "freeable": self.encoder.num_freeable_slots,
            "cached": {mm_hash: sorted(users) for mm_hash, users in self.encoder.cached.items()},
            "order": [[mm_hash, size] for mm_hash, size in self.encoder.freeable.items()],
        }


def differences(trace: Iterator[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Yield (line number, line, answer) for each line that is not answered as recorded; checks invariants too."""
    replayer: Replayer | None = None
    for number, line in enumerate(trace, 1):
        if "cfg" in line:
            replayer = Replayer(line["cfg"])
            continue
        assert replayer is not None, "a trace begins with its configuration"
        got = replayer.answer(line)
        if got != line["want"]:
            yield number, line, got
        if number % 16 == 0:
            replayer.kv.check_valid()
            replayer.encoder.check_valid()
