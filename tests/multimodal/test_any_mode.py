"""An engine runs the same code in every mode, and never asks which caches it has."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmstore import ObjectRef, StaleRefError, StoreClosedError, StoreHandle, multimodal
from shmstore.multimodal import (
    MultiModalCacheConfig,
    engine_receiver_cache_from_config,
    worker_receiver_cache_from_config,
)
from tests.multimodal.helpers import (
    MIB,
    OwnReceiverCache,
    config,
    features,
    item,
    processor_cache,
    shm_sender,
    shm_worker,
    update,
)

MODES = {
    "only": config(MIB, 0),
    "lru": config(MIB),
    "shm": config(MIB, cache_type="shm"),
}


def receiver(settings: MultiModalCacheConfig, handle: StoreHandle | None) -> Any:
    engine = engine_receiver_cache_from_config(settings)
    return engine or worker_receiver_cache_from_config(settings, 0, handle) or OwnReceiverCache()


@pytest.mark.parametrize("mode", MODES)
def test_served_aborted_and_rejected_requests_take_the_same_lines_in_every_mode(
    mode: str,
) -> None:
    settings = MODES[mode]
    with processor_cache(settings) as sender, receiver(settings, sender.handle) as receives:
        assert (StoreHandle if mode == "shm" else type(None)) is type(sender.handle)

        def sent(mm_hashes: list[str]) -> list[Any]:
            with sender.begin(mm_hashes) as begun:
                assert begun == sender.is_cached(mm_hashes)
            inputs = [None if known else (item(8), [update("x")]) for known in begun]
            return [what for what, _ in sender.get_and_update(inputs, mm_hashes)]

        served = features(["a", "b"], sent(["a", "b"]))
        refs = [feature.data for feature in served]
        receives.get_and_update_features(served)
        assert [item(8), item(8)] == [feature.data for feature in served]
        assert 0 == receives.release(refs)
        sender.release(refs)

        aborted = sent(["a", "c"])
        assert (2 if mode == "shm" else 0) == sender.release(aborted)
        assert 0 == sender.release(aborted)

        dropped = sent(["a", "d"])  # the request ends before a worker has read
        assert (2 if mode == "shm" else 0) == receives.release(dropped)
        assert 0 == receives.release(dropped)
        sender.release(dropped)

        receives.clear_cache()
        sender.invalidate(["a", "b"])
        again = features(["a", "b"], sent(["a", "b"]))
        receives.get_and_update_features(again)
        assert [item(8), item(8)] == [feature.data for feature in again]
    sender.close()
    receives.close()
    assert (mode == "shm") == raises(StoreClosedError, lambda: sender.is_cached_item("new"))


def test_the_demo_uses_no_cache_by_its_class() -> None:
    names = {name for name in dir(multimodal) if name.endswith("Cache") and not name.startswith("Base")}
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "examples" / "demo").glob("*.py")]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    assert "processor_cache_from_config" in words
    assert set() == names & words


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


@pytest.mark.parametrize("mode", MODES)
def test_what_was_never_sent_is_refused_alike_in_every_mode(mode: str) -> None:
    settings = MODES[mode]
    with processor_cache(settings) as sender, receiver(settings, sender.handle) as receives:
        output = sender.get_and_update_item((item(8), []), "a")
        for cache in (sender, receives):
            several: list[Any] = [output, [None, output], [b""], [torch.zeros(3)], features(["a"], [output[0]])]
            for wrong in several:
                with pytest.raises(TypeError, match=r"refs\[[01]\] is \w+$"):
                    cache.release(wrong)
            single: list[Any] = [output[0], item(8), ObjectRef(bytes(40)), 7, None, "a"]
            for wrong in single:
                if wrong is not output[0] or mode != "lru":
                    with pytest.raises(TypeError, match=r"in a list, not one "):
                        cache.release(wrong)
        with pytest.raises(TypeError, match="not one bytes"):
            sender.invalidate(b"a")  # type: ignore[arg-type]
        for call in (lambda sent: sender.assign_group(sent, 0), sender.release):
            assert (1 if mode == "shm" else 0) == call([None, output[0], item(8)])


def test_a_worker_that_gives_back_its_part_leaves_the_others_theirs() -> None:
    settings = config(MIB, cache_type="shm", world_size=2)
    with shm_sender(settings) as sender:
        with (
            shm_worker(settings, 0, sender.handle) as first,
            shm_worker(settings, 1, sender.handle) as second,
        ):
            refs = [what for what, _ in sender.get_and_update([(item(8), []), (item(9), [])], ["a", "b"])]
            assert 2 == first.release(refs)
            assert [item(8), item(9)] == second.get_and_update(refs, ["a", "b"])
            fresh = [sender.get_and_update_item(None, "a")[0]]
            assert isinstance(fresh[0], ObjectRef)
            packed = fresh[0].to_bytes()
            forged = ObjectRef(packed[:-1] + bytes([packed[-1] ^ 1]))
            with pytest.raises(StaleRefError):
                first.release([forged, *fresh])
            assert 0 == first.release(fresh), "those after it were given back"
            assert 1 == sender.release(fresh)
