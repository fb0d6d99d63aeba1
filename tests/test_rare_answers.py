"""Answers that `make coverage` showed nobody to ask for: texts, refusals, and what is there of nothing."""

import math
import os
import pickle
import sys
import types
from collections.abc import Callable
from importlib import import_module, reload
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import shmstore.bindings
from shmstore import MsgpackSerde, NestingError, ObjectStoreReader, ObjectStoreWriter, scheduler
from shmstore import multimodal as mm
from shmstore.bindings import store as native
from shmstore.bindings.kv_errors import FULL, check_valid
from shmstore.cli.commands.top import take_sample
from shmstore.errors import CorruptStoreError, SharedMemoryError, StoreNotFoundError, UnsupportedValueError
from shmstore.files import _not_opened, another_user, of_other_namespaces
from shmstore.inspect.segments import _is_memfd, look_at
from shmstore.multimodal.values.fields import MultiModalFieldConfig
from shmstore.multimodal.values.nested import page_locked
from shmstore.multimodal.values.sizes import updates_size
from shmstore.scheduler.block_pool import BlockPool
from shmstore.store import diagnostics, orphans
from shmstore.tiers import open_tier
from shmstore.tiers.directory import DirectoryTier
from shmstore.tiers.mooncake import MooncakeTier
from tests.c.coverage import ROOT, not_run
from tests.multimodal.helpers import config, item, shm_sender
from tests.serde.test_hostile import limited
from tests.support import Stores, in_child, store_name

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
BATCHED = MultiModalFieldConfig.batched("image")
ENCODED = MsgpackSerde().encode({"a": torch.ones(3)})
FOREIGN: Any = types.SimpleNamespace(block_id=1 << 40)

# What is called, its error, and a part of the message.
REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda w: scheduler.KVCacheBlocks([[]]) + cast(Any, 3), TypeError, ""),
    (lambda w: scheduler.BlockHashes([b"a"]).raw(0, 3), IndexError, ""),
    (lambda w: BlockPool(4, True).free_blocks([FOREIGN]), ValueError, "outside the pool"),
    (lambda w: check_valid(FULL), RuntimeError, "fewer"),
    (
        lambda w: mm.MultiModalKwargsItems.from_hf_inputs(
            {"a": torch.ones(2), "b": torch.ones(3)}, {"a": BATCHED, "b": BATCHED}
        ),
        ValueError,
        "same number of items",
    ),
    (lambda w: mm.MultiModalKwargsItem.dummy("image", -1), ValueError, "negative"),
    (lambda w: mm.CacheTypes(dict).item_size({"a": ENDLESS}, "h"), NestingError, "item of 'h'"),
    (
        lambda w: updates_size([mm.ResolvedPromptUpdate("image", 0, "insert", ENDLESS, ENDLESS)], "h"),
        NestingError,
        "prompt updates of 'h'",
    ),
    (lambda w: MsgpackSerde().decode_private(ENCODED.meta, bytearray(8)), CorruptStoreError, "has 8 bytes"),
    (
        lambda w: torch.vmap(lambda x: MsgpackSerde().encode({"a": x}))(torch.ones(2)),
        UnsupportedValueError,
        "without storage",
    ),
    (lambda w: w.stats().hit_ratio_at(3), ValueError, "factor"),
    (lambda w: NestingError(sie=3), TypeError, "attribute 'sie'"),
    (
        lambda w: ObjectStoreWriter.create(capacity=1 << 46, n_readers=1, n_writers=64),
        ValueError,
        "more than a reference can address",
    ),
    (
        lambda w: ObjectStoreWriter.open(store_name(), capacity=1 << 20, n_readers=1, keep=False),
        ValueError,
        "shmstore-",
    ),
    (lambda w: MooncakeTier("host"), ValueError, "host:port"),
    *((lambda w, t=t: DirectoryTier(Path("x"), timeout=t), ValueError, "timeout") for t in (-1, math.nan, 10**400)),
    *((lambda w, t=t: open_tier("redis://host", timeout=t), ValueError, "timeout") for t in (-1, math.nan, 10**400)),
    (lambda w: open_tier("rediss://host:6379?ssl_cert_reqs=perhaps"), ValueError, "option of the URL"),
]


@pytest.mark.parametrize(("call", "error", "part"), REFUSED)
def test_what_cannot_be_is_refused(
    stores: Stores, call: Callable[[Any], object], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        call(stores.create())


def test_values_that_people_see_have_a_text_of_one_line(stores: Stores) -> None:
    writer = stores.create()
    reader = stores.attach(writer)
    writer.put("k", 1)
    pool = BlockPool(4, True)
    found, claim = reader.find("k"), writer.find_or_claim("new")
    values = (found, claim, mm.CacheTypes(dict), MsgpackSerde(), item(3))
    blocks = (pool.null_block, scheduler.KVCacheBlocks([[pool.null_block]]), scheduler.BlockHashes([b"a"]))
    request = scheduler.Request("r", [1, 2])
    for value in (*values, *blocks, request, request.all_token_ids, mm.MultiModalKwargsItems.from_seq([item(3)])):
        text = repr(value)
        assert type(value).__name__ in text
        assert "\n" not in text


def test_values_of_other_types_are_not_equal_and_do_not_add() -> None:
    items, elem = mm.MultiModalKwargsItems.from_seq([item(3)]), next(iter(item(3).values()))
    others: tuple[Any, ...] = (items, elem, mm.PlaceholderRange(0, 1), scheduler.BlockHashes([b"a"]))
    assert [False] * 4 == [value == 3 for value in others]
    assert len(items) == 1


def test_a_list_of_hashes_pickles() -> None:
    hashes = scheduler.BlockHashes([b"a", b"b"])
    assert hashes == pickle.loads(pickle.dumps(hashes))


def test_a_manager_without_contents_has_none_to_show() -> None:
    spec = scheduler.FullAttentionSpec(4, 1, 8, "float16")
    manager = scheduler.KVCacheManager(
        scheduler.KVCacheConfig(4, [scheduler.KVCacheGroupSpec(["a"], spec)]), 64, 4, enable_caching=True
    )
    manager.cache_blocks(scheduler.Request("unknown", [1]), 0)
    assert [] == manager.empty_kv_cache_blocks.get_unhashed_block_ids()
    assert manager.make_prefix_cache_stats() is None
    assert MemoryError.__name__ == limited(BlockPool, (1 << 30) - 1, True)


def test_a_broken_book_is_found() -> None:
    books = scheduler.EncoderCacheManager(8)
    books.check_valid()
    books.num_free_slots += 1
    with pytest.raises(RuntimeError, match="free slots"):
        books.check_valid()


def test_a_cache_is_a_mapping_to_its_end() -> None:
    cache: mm.LRUCache[str, int] = mm.LRUCache(2)
    cache["a"] = cache["b"] = 1
    assert ["a", "b"] == list(cache)
    del cache["a"]
    assert ["b"] == list(cache)
    with pytest.raises(KeyError):
        cache.pop("a")
    cache["c"] = 1
    for key in "bc":
        cache.pin(key)
    with pytest.raises(RuntimeError, match="pinned"):
        cache["d"] = 1
    cache.unpin("c")
    assert ("c", 1) == cache.popitem()


def test_leaves_that_are_no_tensors_need_no_locked_pages() -> None:
    data: Any = [np.ones(2), [3]]
    assert data is page_locked(data)


def test_a_dict_whose_metadata_are_too_long_to_be_remembered_comes_back(stores: Stores) -> None:
    name = "n" * 4096
    writer = stores.create()
    reader = stores.attach(writer)
    for key in "ab":
        assert [name] == list(reader.get(writer.put(key, {name: torch.ones(3)})))


def test_the_package_names_all_that_it_has() -> None:
    assert set(shmstore.__all__) <= set(dir(shmstore))
    import_module("shmstore.__main__")  # as a spawned process does, which runs nothing then


def test_without_its_c_part_the_package_says_how_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shmstore.bindings._shmstore", None)
    with pytest.raises(ModuleNotFoundError, match="not built in"):
        reload(shmstore.bindings)


def test_what_has_gone_meanwhile_has_an_answer(stores: Stores, folder: Path) -> None:
    gone = stores.create()
    seen = look_at(gone.name)
    gone.close(unlink=True)
    assert ((), {}) == (take_sample(seen, None).readers, take_sample(seen, None).kinds)
    assert [] == of_other_namespaces(gone.name, [os.getpid()])
    assert gone.name in another_user(gone.name).message
    error = diagnostics.not_opened(ValueError(), (gone.name, 0, 0, 0), "rank", 2)
    assert "unknown" in str(error)
    (folder / "link").symlink_to("/memfd:x (deleted)")
    with os.scandir(folder) as entries:
        (entry,) = entries
    (folder / "link").unlink()
    assert not _is_memfd(entry)
    with pytest.raises(SharedMemoryError, match="no folder"):
        ObjectStoreReader.attach("a", dir=folder / "gone", wait=0)
    (folder / "file").touch()
    (folder / "loop").symlink_to("loop")
    for no_folder in (folder / "file", folder / "loop"):
        for call in (ObjectStoreWriter.unlink, ObjectStoreWriter.recover, ObjectStoreReader.attach):
            with pytest.raises(SharedMemoryError, match=r"cannot be (used|looked at)"):
                call("a", dir=no_folder)
        with pytest.raises(SharedMemoryError, match="cannot be looked at"):
            _not_opened(f"{no_folder}/a", "unreadable")
    with pytest.raises(StoreNotFoundError, match="gone"):
        _not_opened(str(folder / "gone"), "unreadable")


def test_a_forked_child_that_exits_closes_its_own_stores_alone() -> None:
    with ObjectStoreWriter.create(capacity=4096, n_readers=1) as ours:

        def exits() -> tuple[bool, bool]:
            orphans._at_exit()  # it has none
            own = ObjectStoreWriter.create(capacity=4096, n_readers=1)
            orphans._at_exit()
            return own._open, os.path.exists(own.handle.path)

        assert (False, False) == in_child(exits)
        assert os.path.exists(ours.handle.path)
        ours.put("a", 1)


def test_a_worker_with_a_wrong_policy_leaves_its_rank_free() -> None:
    settings = config(1 << 20, cache_type="shm")
    with shm_sender(settings) as sender:
        with pytest.raises(ValueError, match="policy"):
            mm.worker_receiver_cache_from_config(settings, 0, sender.handle, policy="view")  # type: ignore[arg-type]
        ObjectStoreReader.attach(sender.handle).close()


@pytest.mark.checkout
def test_each_line_that_is_said_not_to_run_is_in_its_file() -> None:
    for path, text in not_run():
        assert text in [line.strip() for line in (ROOT / path).read_text().splitlines()], path


def test_extra_bytes_that_a_broken_writer_makes_longer_are_not_read_beyond_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [300, 5000, 70]

    def copied(writer: Any, ref: bytes, out: Any, size: Any) -> int:
        size[0] = lengths.pop(0)
        return 0

    monkeypatch.setattr(native, "lib", types.SimpleNamespace(shms_writer_extra=copied))
    assert bytes(70) == native.Writer.extra(types.SimpleNamespace(_w=None), b"")  # type: ignore[arg-type]
    assert [] == lengths
