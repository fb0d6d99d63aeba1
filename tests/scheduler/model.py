"""The manager once more, in plain Python, one block at a time: written from the description, to be compared with.

It is also the reference of the benchmarks: what an engine would write with dicts and lists.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any

NULL = 0
Key = tuple[bytes, int]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ---- hashes ----


def cbor(value: Any) -> bytes:
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        major, n = (0x00, value) if value >= 0 else (0x20, -1 - value)
        body = b""
    elif isinstance(value, bytes):
        major, n, body = 0x40, len(value), value
    elif isinstance(value, str):
        major, n, body = 0x60, len(value.encode()), value.encode()
    else:
        major, n, body = 0x80, len(value), b"".join(cbor(item) for item in value)
    if n < 24:
        return bytes([major + n]) + body
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if n < 256**size:
            return bytes([major + code]) + n.to_bytes(size, "big") + body
    raise ValueError(value)


def extra_keys(request: Any, s: int, e: int, form: str = "tagged") -> list[Any] | None:
    keys: list[Any] = []
    if request.lora_name is not None:
        keys.append(["lora", request.lora_name, request.lora_path])
    for item in request.mm_features:
        place = item.mm_position
        if place.length and place.offset < e and place.offset + place.length > s:
            keys.append(["mm", item.identifier, place.offset - s])
    if s == 0 and request.cache_salt is not None:
        keys.append(["salt", request.cache_salt])
    if request.prompt_embeds is not None and len(request.prompt_embeds) > s:
        keys.append(["embeds", hashlib.sha256(request.prompt_embeds[s:e].tobytes()).digest()])
    if form == "flat":
        keys = [value for kind, *values in keys for value in (values[:1] if kind == "lora" else values)]
    return keys or None


def block_hashes(request: Any, block_size: int, seed: str = "0", form: str = "tagged") -> list[bytes]:
    parent = hashlib.sha256(cbor(seed)).digest()
    hashes = []
    for s in range(0, len(request.all_token_ids) // block_size * block_size, block_size):
        tokens = list(request.all_token_ids[s : s + block_size])
        message = [parent, tokens, extra_keys(request, s, s + block_size, form)]
        parent = hashlib.sha256(cbor(message)).digest()
        hashes.append(parent)
    return hashes


# ---- the pool ----


class ModelPool:
    def __init__(self, num_blocks: int, free_order: str, events: bool, int_event_hashes: bool) -> None:
        self.num_blocks = num_blocks
        self.uncached_first = free_order == "uncached_first"
        self.events_on = events
        self.int_event_hashes = int_event_hashes
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.ref = [0] * num_blocks
        self.key: list[Key | None] = [None] * num_blocks
        self.map: dict[Key, OrderedDict[int, None]] = {}
        self.events: list[tuple[Any, ...]] = []

    def shown(self, block_hash: bytes) -> bytes | int:
        return int.from_bytes(block_hash[-8:], "big") if self.int_event_hashes else block_hash

    def find(self, block_hash: bytes, groups: Iterable[int]) -> list[int] | None:
        found = []
        for group in groups:
            blocks = self.map.get((block_hash, group))
            if not blocks:
                return None
            found.append(next(iter(blocks)))
        return found

    def drop_key(self, block: int) -> None:
        key = self.key[block]
        if key is None:
            return
        self.key[block] = None
        del self.map[key][block]
        if not self.map[key]:
            del self.map[key]
        if self.events_on:
            self.events.append(("BlockRemoved", [self.shown(key[0])], "GPU", key[1]))

    def new(self, n: int) -> list[int]:
        if n > len(self.free):
            raise ValueError(f"Cannot get {n} free blocks from the pool")
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.drop_key(block)
            self.ref[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block == NULL:
                continue
            if self.ref[block] == 0:
                del self.free[block]
            self.ref[block] += 1

    def release(self, ordered: Sequence[int]) -> None:
        for block in ordered:
            if block != NULL:
                self.ref[block] -= 1
        to_head = []
        for block in ordered:
            if block == NULL or self.ref[block]:
                continue
            if self.uncached_first and self.key[block] is None:
                to_head.append(block)
            else:
                self.free[block] = None
        for block in reversed(to_head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def store(self, request: Any, table: list[int], start: int, end: int, size: int, factor: int, group: int) -> None:
        hashes = request.block_hashes
        first = None
        for i in range(start, end):
            if table[i] == NULL:
                continue
            first = i if first is None else first
            key = (hashes[(i + 1) * factor - 1], group)
            self.key[table[i]] = key
            self.map.setdefault(key, OrderedDict())[table[i]] = None
        if first is not None and self.events_on:
            own = [self.shown(hashes[(i + 1) * factor - 1]) for i in range(first, end)]
            parent = self.shown(hashes[first * factor - 1]) if first else None
            tokens = list(request.all_token_ids[first * size : end * size])
            self.events.append(("BlockStored", own, parent, tokens, size, request.lora_id, "GPU", group))

    def evict(self, blocks: Sequence[int]) -> None:
        if any(not 0 < block < self.num_blocks for block in blocks):
            raise ValueError("a block id is outside the pool")
        for block in blocks:
            self.drop_key(block)

    def reset(self) -> bool:
        if len(self.free) != self.num_blocks - 1:
            return False
        self.map.clear()
        self.key = [None] * self.num_blocks
        if self.events_on:
            self.events.append(("AllBlocksCleared",))
        return True


# ---- the manager ----


class ModelGroup:
    """One group of layers: its kind of attention, and its table and number of cached blocks for each request."""

    def __init__(self, kind: str, size: int, parameter: int, index: int) -> None:
        self.kind, self.size, self.parameter, self.index = kind, size, parameter, index
        self.spec = (kind, size, parameter)
        self.tables: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def blocks_for(self, tokens: int, encoder_tokens: int) -> int:
        if self.kind == "cross":
            return cdiv(encoder_tokens, self.size)
        if self.kind == "mamba":
            tokens += self.size * self.parameter
        return cdiv(tokens, self.size)

    def skipped(self, computed: int) -> int:
        if self.kind == "sw":
            return computed - self.parameter + 1
        if self.kind == "chunk":
            return computed // self.parameter * self.parameter
        return 0


class ModelManager:
    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[Sequence[Any]],
        max_model_len: int,
        hash_block_size: int,
        *,
        enable_caching: bool = True,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        free_order: str = "uncached_first",
        int_event_hashes: bool = False,
        marked: Sequence[int] = (),
    ) -> None:
        self.pool = ModelPool(num_blocks, free_order, enable_kv_cache_events, int_event_hashes)
        self.groups = [ModelGroup(g[0], g[1], g[2] if len(g) > 2 else 0, i) for i, g in enumerate(groups)]
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size
        self.caching = enable_caching
        specs = list(dict.fromkeys(group.spec for group in self.groups))
        # Kinds in the order in which they are asked: full attention first.
        self.kinds = sorted(specs, key=lambda spec: spec[0] not in ("full", "mla"))
        drops = {self.groups[i].spec for i in marked}
        self.eagle = drops or (set(specs) if use_eagle else set())
        recorded = len(specs) == 2 and [spec[0] in ("full", "mla") for spec in self.kinds] == [True, False]
        self.ahead = len(groups) > 1 and (bool(drops) or not recorded)
        self.alignment = lcm(*(group.size for group in self.groups))
        self.stats = [False, 0, 0, 0, 0, 0, 0]

    # -- look-ups

    def longest(self, groups: list[ModelGroup], hashes: Sequence[bytes], limit: int, drop: bool) -> list[list[int]]:
        """Blocks of each of these groups, which are of one spec, for a prefix of at most `limit` tokens.

        With `drop` it has one block less than what is found, which may be found one block beyond the limit.
        """
        kind, size, parameter = groups[0].kind, groups[0].size, groups[0].parameter
        factor = size // self.hash_block_size if len(self.groups) > 1 else 1
        own = hashes[factor - 1 :: factor]
        count = min(limit // size + (drop and self.ahead and kind != "mamba"), len(own))
        ids = [group.index for group in groups]

        def hit(i: int) -> list[int] | None:
            return self.pool.find(own[i], ids)

        def aligned(length: int) -> bool:
            return length * size % self.alignment == 0

        columns: list[list[int]] = []  # one entry for each position: a block of each group
        null = [NULL] * len(groups)
        if kind in ("full", "mla"):
            for i in range(count):
                blocks = hit(i)
                if blocks is None:
                    break
                columns.append(blocks)
            if drop and columns:
                columns.pop()
            while not aligned(len(columns)):
                columns.pop()
        elif kind == "sw":
            need = max(1, cdiv(parameter - 1, size) + drop)
            found = [hit(i) for i in range(count)]
            for end in range(count, 0, -1):
                run = found[max(0, end - need) : end]
                if aligned(end - drop) and len(run) == need and all(run):
                    columns = [null] * (end - need) + [blocks for blocks in run if blocks]
                    break
            else:
                for blocks in found:
                    if blocks is None:
                        break
                    columns.append(blocks)
                while not aligned(len(columns)):
                    columns.pop()
            if drop and columns:
                columns.pop()
            while not aligned(len(columns)):
                columns.pop()
        elif kind == "chunk":
            first = limit // parameter * parameter // size
            columns = [null] * first
            for i in range(first, count):
                blocks = hit(i)
                if blocks is None:
                    break
                columns.append(blocks)
            while not aligned(len(columns)):
                columns.pop()
            if len(columns) < first:
                return self.longest(groups, hashes, len(columns) * size, drop)
        elif kind == "mamba":
            for i in range(count - 1, -1, -1):
                blocks = hit(i)
                if aligned(i + 1) and blocks is not None:
                    columns = [null] * i + [blocks]
                    break
        return [[column[j] for column in columns] for j in range(len(groups))]

    def get_computed_blocks(self, request: Any) -> tuple[list[list[int]], int]:
        if not self.caching or request.skip_reading_prefix_cache:
            return [[] for _ in self.groups], 0
        limit = request.num_tokens - 1
        result: dict[int, list[int]] = {}
        answers: dict[Any, int] = {}
        dropped: set[Any] = set()
        shortened = True
        while shortened:  # until every kind has agreed to the length
            shortened = False
            for spec in self.kinds:
                groups = [group for group in self.groups if group.spec == spec]
                drop = spec in self.eagle and spec not in dropped
                if answers.get(spec) == limit and not drop:
                    continue
                if spec[0] in ("full", "mla") and spec in answers:
                    continue  # it has every part of its prefix
                tables = self.longest(groups, request.block_hashes, limit, drop)
                result |= {group.index: table for group, table in zip(groups, tables, strict=True)}
                length = len(tables[0]) * groups[0].size
                if drop:
                    dropped.add(spec)
                elif length < limit:
                    dropped.clear()
                shortened = shortened or length < limit
                limit = answers[spec] = length
        blocks = [result[group.index][: limit // group.size] for group in self.groups]
        at = 4 if request.num_preemptions else 1
        self.stats[at] += 1
        self.stats[at + 1] += request.num_tokens
        self.stats[at + 2] += limit
        return blocks, limit

    # -- allocation

    def allocate_slots(
        self,
        request: Any,
        new: int,
        new_computed: int = 0,
        computed_blocks: list[list[int]] | None = None,
        lookahead: int = 0,
        delay: bool = False,
        encoder_tokens: int = 0,
    ) -> list[list[int]] | None:
        if new < 1:
            raise ValueError("num_new_tokens must be greater than 0")
        given = computed_blocks or [[] for _ in self.groups]
        name = request.request_id
        has_table = name in self.groups[0].tables
        if any(given) and (has_table or not self.caching):
            raise ValueError("computed blocks")
        for group in self.groups:
            self.remove_skipped(group, name, request.num_computed_tokens)
        computed = request.num_computed_tokens + new_computed
        need = min(computed + new + lookahead, self.max_model_len)
        total = 0
        for group, blocks in zip(self.groups, given, strict=True):
            have = len(group.tables.get(name, ())) + len(blocks)
            total += max(0, group.blocks_for(need, encoder_tokens) - have)
            total += sum(block != NULL and self.pool.ref[block] == 0 for block in blocks)
        if total > len(self.pool.free):
            return None
        for blocks in given:
            self.pool.touch(blocks)
        added = []
        for group, blocks in zip(self.groups, given, strict=True):
            table = group.tables.setdefault(name, list(blocks))
            group.cached.setdefault(name, len(blocks))
            fresh = self.pool.new(max(0, group.blocks_for(need, encoder_tokens) - len(table)))
            table += fresh
            added.append(fresh)
        if self.caching and not delay:
            self.cache_blocks(request, min(computed + new, request.num_tokens))
        return added

    def remove_skipped(self, group: ModelGroup, name: str, computed: int) -> None:
        table = group.tables.get(name, [])
        removed = []
        for i in range(min(max(group.skipped(computed) // group.size, 0), len(table)) - 1, -1, -1):
            if table[i] == NULL:
                break
            removed.append(table[i])
            table[i] = NULL
        self.pool.release(removed)

    def cache_blocks(self, request: Any, num_tokens: int) -> None:
        for group in self.groups:
            table = group.tables.get(request.request_id, [])
            start, end = group.cached.get(request.request_id, 0), min(num_tokens // group.size, len(table))
            if end > start:
                factor = group.size // self.hash_block_size if len(self.groups) > 1 else 1
                self.pool.store(request, table, start, end, group.size, factor, group.index)
                group.cached[request.request_id] = end

    def free(self, request: Any) -> None:
        for group in self.groups:
            self.pool.release(group.tables.pop(request.request_id, [])[::-1])
            group.cached.pop(request.request_id, None)

    # -- questions

    def get_block_ids(self, name: str) -> list[list[int]]:
        return [list(group.tables.get(name, ())) for group in self.groups]

    def get_num_common_prefix_blocks(self, name: str) -> list[int]:
        answer = []
        for group in self.groups:
            holders = sum(bool(table) for table in group.tables.values())
            n = 0
            if group.kind in ("full", "mla"):
                for block in group.tables.get(name, ()):
                    if self.pool.ref[block] != holders:
                        break
                    n += 1
            answer.append(n)
        return answer

    def make_prefix_cache_stats(self) -> list[Any]:
        stats, self.stats = self.stats, [False, 0, 0, 0, 0, 0, 0]
        return stats

    def reset_prefix_cache(self) -> bool:
        done = self.pool.reset()
        self.stats[0] = self.stats[0] or done
        return done

    def take_events(self) -> list[tuple[Any, ...]]:
        events, self.pool.events = self.pool.events, []
        return events
