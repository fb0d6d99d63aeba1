"""Block hashes: the worked examples of the description, and the same hashes by every way to compute them."""

from __future__ import annotations

import hashlib
import itertools
import sys
import types
from typing import Any, cast

import numpy as np
import pytest
import torch

from shmstore.bindings.blockhash import NO_EXTRAS, sha256_chain, sha256_ready
from shmstore.scheduler import (
    BlockHasher,
    BlockHashes,
    BlockPool,
    Request,
)
from shmstore.scheduler.block_hasher import encode_cbor
from tests.scheduler import model
from tests.scheduler.helpers import features, hasher


def test_the_seed_hash_is_that_of_the_seed_as_cbor_text() -> None:
    assert "4e1195df020de59e" == BlockHasher(4).seed_hash.hex()[:16]
    assert hashlib.sha256(b"\x61\x37").digest() == BlockHasher(4, seed="7").seed_hash


def test_a_block_is_encoded_as_in_the_example() -> None:
    value = [b"\x11" * 32, list(range(16)), ["lora", "img", b"\x01"]]
    want = "835820" + "11" * 32 + "90000102030405060708090a0b0c0d0e0f" + "83646c6f726163696d674101"
    assert want == encode_cbor(value).hex()
    assert want == model.cbor(value).hex()


LIBRARIES = pytest.mark.parametrize("library", ["auto", "hashlib"])


@LIBRARIES
def test_lora_salt_and_an_item_give_the_hashes_of_the_flat_example(library: str) -> None:
    request = Request(
        "r", range(8), block_hasher=hasher(4, library, extra_keys="flat"), lora_name="L", cache_salt="s",
        mm_features=features(("img", 2, 4)), lora_path="not in the flat form",
    )  # fmt: skip
    assert ["0204491c7a770529", "3460421f18eb7203"] == [block_hash.hex()[:16] for block_hash in request.block_hashes]
    assert [["L", "img", 2, "s"], ["L", "img", -2]] == [model.extra_keys(request, s, s + 4, "flat") for s in (0, 4)]


@LIBRARIES
@pytest.mark.parametrize(
    ("path", "known"),  # the hashes that Python's cbor2 and hashlib give
    [("/l", ["4a64adef65e2eab0", "147b764a8a042fe6"]), (None, ["84d430e9b67b8ec8", "b1d4a7b932783be0"])],
)
def test_tagged_extra_keys_are_encoded_kind_by_kind(library: str, path: str | None, known: list[str]) -> None:
    rows = np.arange(4, dtype=np.uint8).reshape(2, 2)
    request = Request(
        "r", range(8), block_hasher=hasher(4, library), lora_name="L", lora_path=path, cache_salt="s",
        mm_features=features(("img", 2, 4)), prompt_embeds=rows,
    )  # fmt: skip
    lora = b"\x83\x64lora\x61L" + (b"\xf6" if path is None else b"\x62/l")
    digest = hashlib.sha256(bytes([0, 1, 2, 3])).digest()
    first = b"\x84" + lora + b"\x83\x62mm\x63img\x02" + b"\x82\x64salt\x61s" + b"\x82\x66embeds\x58\x20" + digest
    second = b"\x82" + lora + b"\x83\x62mm\x63img\x21"
    parent, want = hashlib.sha256(b"\x61\x30").digest(), []
    for tokens, extras in ((b"\x84\0\1\2\3", first), (b"\x84\4\5\6\7", second)):
        parent = hashlib.sha256(b"\x83\x58\x20" + parent + tokens + extras).digest()
        want.append(parent)
    assert want == request.block_hashes == model.block_hashes(request, 4)
    assert known == [block_hash.hex()[:16] for block_hash in want]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxh3_cbor"])
@pytest.mark.parametrize("value", ["X", hashlib.sha256(bytes(8)).digest()], ids=["text", "digest"])
def test_no_value_of_one_kind_stands_for_one_of_another(algorithm: str, value: Any, xxh3: list[bytes]) -> None:
    """Requests with the same tokens and the same value as each choice of kinds have different hashes, all of them.

    The second value is the digest of the embeddings, too.
    """
    kinds: list[dict[str, Any]] = [
        {"lora_name": value, "lora_path": "p"},
        {"mm_features": features((value, 0, 2))},
        {"cache_salt": value},
        {"prompt_embeds": np.zeros((4, 2), np.uint8)},
    ]
    chosen = [choice for n in range(len(kinds) + 1) for choice in itertools.combinations(kinds, n)]
    chosen += [({"lora_name": value, "lora_path": path},) for path in (None, value)]

    def distinct(form: str) -> int:
        hasher = BlockHasher(4, algorithm, extra_keys=form)
        requests = [
            Request("r", [0] * 4, block_hasher=hasher, **dict(itertools.chain(*map(dict.items, c)))) for c in chosen
        ]
        return len({request.block_hashes[0] for request in requests})

    assert len(chosen) == distinct("tagged") == 18
    assert distinct("flat") < 18 - 2  # a LoRA name and a salt, and the paths


def test_an_adapter_under_the_name_of_another_finds_nothing_of_it() -> None:
    def hashes(**adapter: Any) -> list[bytes]:
        request = Request("r", range(4))
        for name, value in adapter.items():
            setattr(request, name, value)
        return list(BlockHasher(4)(request))

    def lora(name: str, **path: str) -> types.SimpleNamespace:  # with the attributes of vLLM's LoRARequest
        return types.SimpleNamespace(lora_name=name, lora_int_id=1, **path)

    one, two = hashes(lora_name="L", lora_path="/1"), hashes(lora_name="L", lora_path="/2")
    assert one != two
    assert one == hashes(lora_request=lora("L", lora_path="/1"))
    assert two == hashes(lora_request=lora("L", lora_path="/2"), lora_name="other", lora_path="/1")
    assert hashes(lora_name="L") == hashes(lora_request=lora("L"))


@pytest.mark.parametrize("embeds", [np.arange(30, dtype=np.float32).reshape(10, 3), np.zeros((10, 2), np.int16)])
def test_prompt_embeddings_are_in_the_key_of_the_blocks_that_they_reach(embeds: Any) -> None:
    request = Request("r", None, block_hasher=BlockHasher(4), prompt_embeds=embeds)
    assert [0] * 10 == request.all_token_ids
    request.append_output_token_ids([5, 6])
    request.append_output_token_ids([1, 2, 3, 4])
    assert model.block_hashes(request, 4) == request.block_hashes
    assert [["embeds", hashlib.sha256(embeds[8:10].tobytes()).digest()]] == model.extra_keys(request, 8, 12)
    assert None is model.extra_keys(request, 12, 16)


def test_embeddings_hash_by_their_raw_bytes_whatever_holds_them() -> None:
    tensor = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    rows = tensor.view(torch.uint8).numpy()
    transposed = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8).T.contiguous().T
    hashes = [
        Request("r", None, block_hasher=BlockHasher(2), prompt_embeds=x).block_hashes
        for x in (tensor, rows, transposed)
    ]
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.parametrize("form", ["tagged", "flat"])
@pytest.mark.parametrize("size", [1, 3, 16, 24, 256, 300])
def test_all_ways_to_hash_agree_for_every_size_of_token(size: int, form: str) -> None:
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**62, 7] * (size // 4 + 1)
    items = features(("a" * 64, 0, 9), ("b", 3, 40), ("c", 3, 2), ("d", 17, 0), ("e", 17, 1))
    made = [
        Request(
            "r", tokens, block_hasher=hasher(size, library, extra_keys=form), mm_features=items,
            lora_name="läuft",
        )
        for library in ("auto", "hashlib")
    ]  # fmt: skip
    assert len(tokens) // size == len(made[0].block_hashes)
    assert model.block_hashes(made[0], size, form=form) == made[0].block_hashes == made[1].block_hashes


def test_a_hasher_goes_on_where_the_list_ends_and_changes_nothing_by_itself() -> None:
    request = Request("r", list(range(40)))
    hasher = BlockHasher(4)
    whole = hasher(request)
    assert (10, 0) == (len(whole), len(request.block_hashes))
    request.block_hashes.extend(whole[:3])
    assert whole[3:] == hasher(request)
    request.block_hashes = cast(Any, list(whole[:7]))
    assert whole[7:] == hasher(request)


def test_xxh3_without_its_package_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match="xxhash"):
        BlockHasher(4, "xxh3_cbor")


@pytest.fixture
def xxh3(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The messages given to a stand-in for XXH3-128, which is an optional package: they matter here, not the digest."""
    seen: list[bytes] = []

    def digest(message: bytes) -> bytes:
        seen.append(message)
        return hashlib.md5(message).digest()

    stand_in = types.ModuleType("xxhash")
    stand_in.xxh3_128_digest = digest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xxhash", stand_in)
    return seen


def test_xxh3_hashes_the_same_messages_with_parents_of_16_bytes(xxh3: list[bytes]) -> None:
    hasher = BlockHasher(4, "xxh3_cbor")
    request = Request("r", range(8), block_hasher=hasher, cache_salt="s")
    assert 16 == request.block_hashes.width
    seed = hashlib.md5(b"\x61\x30").digest()
    first = hashlib.md5(model.cbor([seed, [0, 1, 2, 3], [["salt", "s"]]])).digest()
    second = hashlib.md5(model.cbor([first, [4, 5, 6, 7], None])).digest()
    assert (seed, [first, second], 3) == (hasher.seed_hash, request.block_hashes[:], len(xxh3))


def test_the_real_xxh3_gives_its_known_answer() -> None:
    xxhash = pytest.importorskip("xxhash", reason="the optional package xxhash is not installed")
    assert xxhash.xxh3_128_digest(b"\x61\x30") == BlockHasher(4, "xxh3_cbor").seed_hash


def test_what_is_no_token_is_refused_also_of_a_request_of_ones_own() -> None:
    for bad in ("x", 2**70, 1.5, None):
        req = types.SimpleNamespace(block_hashes=[], num_tokens=4, all_token_ids=[1, 2, 3, bad])
        with pytest.raises(ValueError, match="token ids are integers"):
            BlockHasher(4)(req)


def test_block_hashes_look_like_a_list_of_bytes() -> None:
    plain = [i.to_bytes(2, "big") * 16 for i in range(700)]
    hashes = BlockHashes(plain)
    assert plain == hashes
    assert hashes == plain
    assert plain == list(hashes)
    assert (plain[3], plain[-1], plain[2:600], plain[::7]) == (hashes[3], hashes[-1], hashes[2:600], hashes[::7])
    assert (plain + plain, plain + plain) == (hashes + plain, plain + hashes)
    assert (True, False, 5) == (plain[5] in hashes, b"x" in hashes, hashes.index(plain[5]))
    assert [] == hashes[5:2]
    hashes.append(b"y" * 32)
    assert 701 == len(hashes)
    with pytest.raises(ValueError, match="1 to 32 bytes"):
        BlockHashes([b"z" * 33])
    with pytest.raises(IndexError):
        hashes[701]


@pytest.mark.parametrize(
    "value", [0, 23, 24, 255, 256, 65536, 2**32, 2**64 - 1, -1, -25, "é" * 300, b"\0" * 70000, None, [], [[1], ["a"]]]
)
def test_cbor_is_what_the_model_writes(value: Any) -> None:
    assert model.cbor(value) == encode_cbor(value)


@pytest.mark.parametrize("value", [1.5, True, {}])
def test_cbor_of_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_cbor(value)
    with pytest.raises(ValueError, match="64 bits"):
        encode_cbor(2**64)


def test_a_request_knows_its_tokens() -> None:
    request = Request("r", [1, 2, 3], mm_features=features(("a", 0, 2), ("b", 2, 1)))
    request.append_output_token_ids([4, 5])
    request.append_output_token_ids(6)
    assert ([1, 2, 3, 4, 5, 6], 6, 3, [4, 5, 6]) == (
        request.all_token_ids[:], request.num_tokens, request.num_output_tokens, request.output_token_ids,
    )  # fmt: skip
    assert (2, 1) == (request.get_num_encoder_tokens(0), request.get_num_encoder_tokens(1))
    assert (0, 0, False, []) == (
        request.num_computed_tokens, request.num_preemptions, request.skip_reading_prefix_cache,
        list(request.block_hashes),
    )  # fmt: skip
    view = request.all_token_ids
    assert ([2, 3], 6, list) == (view[1:3], view[-1], type(view[:2]))
    with pytest.raises(TypeError):
        view[0] = 1  # type: ignore[index]


@pytest.mark.parametrize("size", [8, 16, 32, 40])
def test_a_parent_of_another_size_is_hashed_whole_by_either_library(size: int) -> None:
    def request() -> types.SimpleNamespace:
        parent = bytes(range(size))
        return types.SimpleNamespace(block_hashes=[parent], num_tokens=8, all_token_ids=list(range(8)))

    by_hashlib = list(hasher(4, "hashlib")(request()))
    assert by_hashlib == list(BlockHasher(4)(request()))
    assert len(by_hashlib) == 1


def duck(items: list[Any], tokens: int = 16) -> Any:
    return types.SimpleNamespace(
        block_hashes=[], num_tokens=tokens, all_token_ids=list(range(tokens)), mm_features=items,
        lora_name=None, cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


@pytest.mark.parametrize("library", ["auto", "hashlib"])
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", 0, 2), ("b", 9, 2), ("c", 5, 2)], "item 2 begins before item 1"),
        ([("a", 0, 2), ("b", -1, 2)], "item 1"),
        ([("a", 0, 2), ("b", 3, -2)], "item 1"),
        ([("a", 0, 2), ("b", 3, 2**60)], "item 1"),
        ([("a", -1, 9)], "the offset of item 0"),
        ([("a", 0, -2)], "the length of item 0"),
        ([("a", 2, 2**60 - 2)], "the end of item 0"),
        ([("a", 3, 2**63)], "item 0"),
        ([("a", 2**63, 1)], "item 0"),
    ],
)
def test_items_that_no_block_key_can_name_are_refused_by_number(library: str, items: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hasher(4, library)(duck(features(*items)))


def test_an_item_that_reaches_far_beyond_the_prompt_is_in_every_key() -> None:
    req = duck(features(("a", 2, 2**60 - 3)))
    assert model.block_hashes(req, 4) == list(BlockHasher(4)(req)) == list(hasher(4, "hashlib")(req))


# ---- block hashes ----


class LongBytes(bytes):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return 32


@pytest.mark.parametrize("make", [LongBytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_a_hash_is_the_bytes_that_its_object_really_has(make: Any) -> None:
    hashes = BlockHashes()
    hashes.append(make(b"ab"))
    hashes.extend([make(b"cd"), make(b"ef")])
    assert ([b"ab", b"cd", b"ef"], 2) == (hashes[:], hashes.width)
    pool, request = BlockPool(9, True), types.SimpleNamespace(block_hashes=hashes, all_token_ids=[1, 2, 3])
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, 1, 1, 0)
    assert blocks == pool.get_cached_block(make(b"ab"), [0])
    assert [None, None] == [pool.get_cached_block(wrong, [0]) for wrong in (b"", b"a" * 33)]


@pytest.mark.parametrize("wrong", [LongBytes(b""), "ab", 32, [1] * 32, b"z" * 16, b"z" * 33])
def test_what_is_no_hash_beside_others_is_refused(wrong: Any) -> None:
    hashes = BlockHashes([b"x" * 32])
    for items in ([wrong], [b"y" * 32, wrong]):
        with pytest.raises((TypeError, ValueError)):
            hashes.extend(items)
    with pytest.raises((TypeError, ValueError)):
        hashes.append(wrong)
    assert [b"x" * 32] == hashes[:]


@pytest.mark.skipif(not sha256_ready(), reason="no libcrypto on this host: hashlib is all there is")
@pytest.mark.parametrize("ready", [True, False])
def test_one_library_gives_all_hashes_of_a_prompt(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want = Request("r", range(64), block_hasher=BlockHasher(16)).block_hashes
    monkeypatch.setattr("shmstore.bindings.blockhash.sha256_ready", lambda: ready)
    other = "digest_chain" if ready else "sha256_chain"
    monkeypatch.setattr(f"shmstore.bindings.blockhash.{other}", lambda *args: pytest.fail(f"{other} was asked for"))
    assert want == Request("r", range(64), block_hasher=BlockHasher(16)).block_hashes


def test_c_copies_a_parent_only_of_the_size_of_its_hashes() -> None:
    for parent in (b"", b"short", b"x" * 31, b"x" * 33):
        with pytest.raises(ValueError, match="32 bytes"):
            sha256_chain(BlockHashes(), parent, 0, 4, [1, 2, 3, 4], NO_EXTRAS)
