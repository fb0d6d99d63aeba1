"""What travels in the place of a tensor, by SGLang's own wrap, messages, broadcast and vote; ranks are processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, msgpack_decode, msgpack_encode
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.plugins import load_plugins

from tests.sglang.conftest import left_of
from tests.sglang.harness import Ranks, ranks_of, request, send
from tests.sglang.ranks import listed, patch, seen

IMPORTED = set(sys.modules)
load_plugins()
PLUGIN_IMPORTS = set(sys.modules) - IMPORTED

from shmstore import ObjectRef, ObjectStoreReader  # noqa: E402
from shmstore.errors import SharedMemoryError  # noqa: E402
from shmstore.integrations.sglang import STORE, pointer  # noqa: E402  what it replaces must be known first
from shmstore.integrations.sglang.sender import Sender  # noqa: E402

STOCK = pointer.ShmPointerMMData.__mro__[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(tmp_path_factory.mktemp("ranks"), 2) as made:
        yield made


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store of this process, for two ranks."""
    patch(0, 2)
    made = Sender()
    monkeypatch.setattr(pointer, "sender", made)
    yield made
    gc.collect()
    if made.writer is not None:
        made.writer.close()


def expected(*features: Any) -> list[str]:
    return [seen(part.clone()) for feature in features for part in listed(feature)]


def pixels(number: int, rows: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((rows, 1176), generator=torch.Generator().manual_seed(number)).to(dtype)


def pointers_of(made: TokenizedGenerateReqInput) -> list[Any]:
    return [part for item in made.mm_inputs.mm_items for part in listed(item.feature)]


def test_the_plugin_leaves_it_to_sglang_to_import_prometheus_client_first() -> None:
    assert "shmstore.integrations.sglang.sender" in PLUGIN_IMPORTS
    assert "prometheus_client" not in PLUGIN_IMPORTS


def test_each_rank_gets_writable_tensors_of_its_own(ranks: Ranks, sender: Any) -> None:
    features = [
        pixels(1),
        [pixels(2, 3, torch.bfloat16), pixels(3, 5)],
        pixels(4).T,
        torch.arange(7, dtype=torch.uint8),
    ]
    for _ in range(2):  # ranks write to what they get, and nobody sees that
        made = request(*features)
        assert {pointer.ShmPointerMMData} == {type(one) for one in pointers_of(made)}
        send(ranks, made)
        assert [expected(*features)] * 2 == ranks.answers()
    stats = sender.writer.stats()
    assert (5, 5, 0, 0) == (stats.puts, stats.hits, stats.open_leases, sender.files)


def test_samples_of_one_request_share_what_is_stored_and_it_ends_with_their_tensor(ranks: Ranks, sender: Any) -> None:
    tensor = pixels(1)
    for _ in range(4):
        send(ranks, request(tensor))
        assert [expected(tensor)] * 2 == ranks.answers()
    assert (1, 3, 1) == (sender.writer.stats().puts, sender.writer.stats().hits, len(sender.writer))
    del tensor
    assert 0 == len(sender.writer)


def test_a_tensor_that_takes_the_place_of_another_has_its_own_bytes(ranks: Ranks, sender: Any) -> None:
    ids = set()
    for number in range(20):
        tensor = pixels(number, 2)
        ids.add(id(tensor))
        send(ranks, request(tensor))
        assert [expected(tensor)] * 2 == ranks.answers()
        del tensor
    assert len(ids) < 20


def test_items_of_one_hash_share_what_is_stored_but_not_with_another_shape(ranks: Ranks, sender: Any) -> None:
    for made in (pixels(1), pixels(1), pixels(1, 32), pixels(1).bfloat16()):
        send(ranks, request(made, hashes=(7,)))
        assert [expected(made)] * 2 == ranks.answers()
    assert (3, 1, 3) == (sender.writer.stats().puts, sender.writer.stats().hits, len(sender.writer))


def test_in_a_named_store_the_hash_of_a_caller_is_for_one_process(
    sender: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE, name)
    for number, given in enumerate((None, 7)):
        made = request(tensor := pixels(number), hashes=(given,))
        made.mm_inputs = MultimodalProcessorOutput(
            mm_items=[MultimodalDataItem(modality=Modality.IMAGE, feature=tensor, hash=given)]
        )
        pointer._set_pad_value(MultimodalDataItem.set_pad_value, made.mm_inputs.mm_items[0])
        pointers_of(mm_utils.wrap_shm_features(made))
    assert [True, False] == [sender._run not in one for one in sorted(sender.writer.namespaces(), key=len)]


def test_a_given_tensor_takes_the_place_of_another_under_its_hash(ranks: Ranks, sender: Any) -> None:
    """The hash may be a caller's. What was handed out before stays what it was."""
    first = request(pixels(1), hashes=(7,))
    for made in (pixels(2), pixels(2), pixels(1)):
        send(ranks, request(made, hashes=(7,)))
        assert [expected(made)] * 2 == ranks.answers()
    send(ranks, first)
    assert [expected(pixels(1))] * 2 == ranks.answers()
    stats = sender.writer.stats()
    assert (3, 1, 0) == (stats.puts, len(sender.writer), stats.open_leases)


def test_a_tensor_that_was_written_to_is_sent_as_it_is_now(ranks: Ranks, sender: Any) -> None:
    tensor = pixels(1)
    for _ in range(2):
        tensor.numpy()[0] += 1
        send(ranks, request(tensor))
        assert [expected(tensor)] * 2 == ranks.answers()


@pytest.mark.parametrize("how", ["never sent", "refused while it is encoded"])
def test_a_request_that_is_not_sent_leaves_no_lease(how: str, ranks: Ranks, sender: Any) -> None:
    made = request(pixels(1), pixels(2), stop="\ud800")  # which no UTF-8 has, and JSON from a client may
    assert 2 == sender.writer.stats().open_leases
    if how != "never sent":
        with pytest.raises(UnicodeEncodeError):
            send(ranks, made)
    del made
    gc.collect()
    assert (0, 0) == (sender.writer.stats().open_leases, len(sender.writer))


def test_the_next_engine_of_a_process_has_a_store_of_its_own(sender: Any) -> None:
    """Its ranks are others, and a caller's hash of the image alone may name other bytes for its model."""
    tensor = pixels(1)
    for size in (2, 1):
        patch(0, size)
        request(tensor, hashes=(7,))
        stats = sender.writer.stats()
        assert (size, 1, 0) == (stats.n_readers, stats.puts, stats.hits)
        assert [sender.writer.name] == left_of(os.getpid(), "shmstore")
    with ObjectStoreReader.attach(sender.writer.handle):
        patch(0, 1)
        (other,) = pointers_of(request(tensor, hashes=(7,)))
        assert (None, 1) == (other._ref, sender.writer.stats().puts)
        other.close_and_unlink()


@pytest.mark.parametrize("rows", [64, 20_000], ids=["full", "too large"])
def test_what_the_store_has_no_room_for_goes_by_sglangs_own_files(rows: int, ranks: Ranks, sender: Any) -> None:
    request(pixels(0, 1))  # makes the store
    held = [sender.writer.put(f"held-{n}", torch.zeros(1 << 20, dtype=torch.uint8)) for n in range(63)]
    features = [pixels(number, rows) for number in range(5)]
    made = request(*features)
    files = [one for one in pointers_of(made) if one._ref is None]
    assert len(files) == sender.files == len(left_of(os.getpid(), "sgl_shm_mm"))
    assert 0 < len(files) <= 5
    send(ranks, made)
    assert [expected(*features)] * 2 == ranks.answers()
    assert [] == left_of(os.getpid(), "sgl_shm_mm")
    for ref in held:
        sender.writer.cancel(ref)


@pytest.mark.parametrize(
    ("wrong", "left"),
    [({"_ref": ObjectRef.from_bytes(bytes(40))}, 1), ({"shape": None}, 0), ({"shape": torch.Size([7])}, 0)],
    ids=["reference", "no shape", "other shape"],
)
def test_ranks_vote_out_what_they_cannot_read_and_go_on(
    wrong: dict[str, Any], left: int, ranks: Ranks, sender: Any
) -> None:
    made = request(pixels(1), pixels(2))
    vars(pointers_of(made)[0]).update(wrong)  # the other one is then not read
    send(ranks, made)
    assert ["MMInputsProcessError"] * 2 == ranks.answers()
    assert left == sender.writer.stats().open_leases  # of the reference that nobody was sent
    tensor = pixels(3)
    send(ranks, request(tensor))
    assert [expected(tensor)] * 2 == ranks.answers()


def test_a_hop_decodes_a_pointer_without_opening_anything(sender: Any) -> None:
    made = request(pixels(1))
    again = msgpack_decode(msgpack_encode(msgpack_decode(msgpack_encode(made))))
    (one,), (sent,) = pointers_of(again), pointers_of(made)
    assert (sent._ref, sent._store, sent.shape, sent.dtype) == (one._ref, one._store, one.shape, one.dtype)
    assert sent._store not in pointer._readers
    assert 1 == sender.writer.stats().open_leases


def test_a_malformed_state_is_an_error_of_materialize_alone_also_one_hop_later(sender: Any) -> None:
    (made,) = pointers_of(request(pixels(1)))
    good = made.__getstate__()
    ref, store = good["shmstore"]
    malformed = [None, 7, "text", {}, good | {"shape": None}, good | {"shape": 7}]
    malformed += [{name: good[name] for name in good if name != left_out} for left_out in ("shape", "dtype")]
    packed = [None, 7, [], [ref], [ref, store, 1], [ref[1:], store], ["text", store], [ref, 7], [ref, []], [ref, "{}"]]
    for state in [*malformed, *(good | {"shmstore": one} for one in packed)]:
        for _ in range(2):
            one = pointer.ShmPointerMMData.__new__(pointer.ShmPointerMMData)
            one.__setstate__(state)
            state = one.__getstate__()
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                one.materialize()
            one.close_and_unlink()


def test_what_is_not_the_tensor_that_the_pointer_says_is_not_given_to_a_model(sender: Any) -> None:
    (made,) = pointers_of(request(pixels(1)))
    good = made.__getstate__()
    _, store = good["shmstore"]
    others = [made._ref, made._ref, made._ref, sender.writer.put("a", {}), sender.writer.put("b", pixels(1).numpy())]
    said = [{"shape": torch.Size([1176, 64])}, {"shape": torch.Size([64])}, {"dtype": torch.int32}, {}, {}]
    for ref, wrong in zip(others, said, strict=True):
        made.__setstate__(good | wrong | {"shmstore": [ref.to_bytes(), store]})
        with pytest.raises(RuntimeError):
            made.materialize()


def test_a_tensor_that_cannot_be_mapped_privately_is_copied(sender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ObjectStoreReader.get

    def unmappable(reader: Any, ref: Any, **options: Any) -> Any:
        if options.get("private"):
            raise SharedMemoryError("no room")
        return get(reader, ref, **options)

    monkeypatch.setattr(ObjectStoreReader, "get", unmappable)
    (one,) = pointers_of(msgpack_decode(msgpack_encode(request(tensor := pixels(1)))))
    assert torch.equal(tensor, one.materialize())


@pytest.mark.parametrize("parallel", [{"dp_size": 2}, {"attn_dp_enabled": True}])
def test_with_data_parallelism_a_lease_ends_with_its_request(parallel: dict[str, Any], sender: Any) -> None:
    vars(patch(0, 2)).update(parallel)
    manager = SimpleNamespace(rid_to_state={"r": SimpleNamespace()})
    made = request(tensor := pixels(1))
    (one,) = pointers_of(msgpack_decode(pointer._dispatch(lambda _, message: msgpack_encode(message), manager, made)))
    del made
    assert torch.equal(tensor, one.materialize())
    assert 1 == sender.writer.stats().open_leases  # another replica may read it
    manager.rid_to_state.clear()
    assert 0 == sender.writer.stats().open_leases

    request(pixels(2))  # never sent
    assert 0 == sender.writer.stats().open_leases


def test_a_scheduler_without_the_plugin_fails_the_request_and_can_open_nothing(sender: Any, tmp_path: Path) -> None:
    patch(0, 1)
    with ranks_of(tmp_path, 1, SHMSTORE_SGLANG="0") as stock:
        tensor = pixels(1)
        made = request(tensor)
        state = pointers_of(made)[0].__getstate__()
        send(stock, made)
        assert ["MMInputsProcessError"] == stock.answers()
    assert [sender.writer.name] == left_of(os.getpid(), "shmstore")
    theirs = STOCK.__new__(STOCK)
    theirs.__setstate__(state)
    with pytest.raises(RuntimeError):
        theirs.materialize()
    assert 1 == len(sender.writer)


def test_what_killed_ranks_have_not_read_is_held_no_longer(sender: Any, tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2) as ranks:
        tensor = pixels(1)
        send(ranks, request(tensor))
        assert [expected(tensor)] * 2 == ranks.answers()
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        for number in range(5):
            send(ranks, request(pixels(number)))
        assert 5 == sender.writer.stats().open_leases
    assert 0 == sender.writer.stats().open_leases
