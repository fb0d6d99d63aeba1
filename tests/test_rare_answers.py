"""Answers that `make coverage` showed nobody to ask for: texts, refusals, and what is there of nothing."""

import math
import os
import pickle
import sys
import types
from importlib import import_module, reload
from pathlib import Path
from typing import Any

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
    with pytest.raises(TypeError):
        scheduler.KVCacheBlocks([[]]) + 3  # type: ignore[operator]


def test_a_list_of_hashes_pickles_and_gives_none_that_it_lacks() -> None:
    hashes = scheduler.BlockHashes([b"a", b"b"])
    assert hashes == pickle.loads(pickle.dumps(hashes))
    with pytest.raises(IndexError):
        hashes.raw(0, 3)


def test_a_manager_without_contents_has_none_to_show() -> None:
    spec = scheduler.FullAttentionSpec(4, 1, 8, "float16")
    manager = scheduler.KVCacheManager(
        scheduler.KVCacheConfig(4, [scheduler.KVCacheGroupSpec(["a"], spec)]), 64, 4, enable_caching=True
    )
    manager.cache_blocks(scheduler.Request("unknown", [1]), 0)
    assert [] == manager.empty_kv_cache_blocks.get_unhashed_block_ids()
    assert manager.make_prefix_cache_stats() is None

    class Foreign:
        block_id = 1 << 40

    with pytest.raises(ValueError, match="outside the pool"):
        manager.block_pool.free_blocks([Foreign()])  # type: ignore[list-item]


def test_a_pool_beyond_the_memory_is_a_memory_error() -> None:
    assert MemoryError.__name__ == limited(BlockPool, (1 << 30) - 1, True)


def test_a_broken_book_is_found() -> None:
    with pytest.raises(RuntimeError, match="fewer"):
        check_valid(FULL)
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


def test_items_that_cannot_be_are_refused() -> None:
    batched = MultiModalFieldConfig.batched("image")
    with pytest.raises(ValueError, match="same number of items"):
        mm.MultiModalKwargsItems.from_hf_inputs({"a": torch.ones(2), "b": torch.ones(3)}, {"a": batched, "b": batched})
    with pytest.raises(ValueError, match="negative"):
        mm.MultiModalKwargsItem.dummy("image", -1)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NestingError, match="item of 'h'"):
        mm.CacheTypes(dict).item_size({"a": endless}, "h")
    with pytest.raises(NestingError, match="prompt updates of 'h'"):
        updates_size([mm.ResolvedPromptUpdate("image", 0, "insert", endless, endless)], "h")


def test_leaves_that_are_no_tensors_need_no_locked_pages() -> None:
    data: Any = [np.ones(2), [3]]
    assert data is page_locked(data)


def test_a_dict_whose_metadata_are_too_long_to_be_remembered_comes_back(stores: Stores) -> None:
    name = "n" * 4096
    writer = stores.create()
    reader = stores.attach(writer)
    for key in "ab":
        assert [name] == list(reader.get(writer.put(key, {name: torch.ones(3)})))


def test_a_payload_that_is_too_short_is_corrupt_however_it_is_read() -> None:
    encoded = MsgpackSerde().encode({"a": torch.ones(3)})
    with pytest.raises(CorruptStoreError, match="has 8 bytes"):
        MsgpackSerde().decode_private(encoded.meta, bytearray(8))


def test_a_tensor_inside_a_transform_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="without storage"):
        torch.vmap(lambda x: MsgpackSerde().encode({"a": x}))(torch.ones(2))


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


def test_a_call_with_what_it_does_not_know_is_refused(stores: Stores) -> None:
    writer = stores.create()
    with pytest.raises(ValueError, match="factor"):
        writer.stats().hit_ratio_at(3)
    with pytest.raises(TypeError, match="attribute 'sie'"):
        NestingError(sie=3)


def test_a_store_beyond_what_a_reference_addresses_is_refused() -> None:
    with pytest.raises(ValueError, match="more than a reference can address"):
        ObjectStoreWriter.create(capacity=1 << 46, n_readers=1, n_writers=64)
    with pytest.raises(ValueError, match="shmstore-"):
        ObjectStoreWriter.open(store_name(), capacity=1 << 20, n_readers=1, keep=False)


def test_urls_of_tiers_with_wrong_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host:port"):
        MooncakeTier("host")
    for timeout in (-1, math.nan, 10**400):
        with pytest.raises(ValueError, match="timeout"):
            DirectoryTier(tmp_path, timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            open_tier("redis://host", timeout=timeout)
    with pytest.raises(ValueError, match="option of the URL"):
        open_tier("rediss://host:6379?ssl_cert_reqs=perhaps")


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
