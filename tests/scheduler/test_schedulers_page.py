"""The programs of docs/guides/schedulers.md run as they stand there."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmstore.errors import StoreFullError
from shmstore.scheduler import PrefixCacheStats
from tests.scheduler.helpers import admit, manager, request

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "schedulers.md"


def run_program(number: int, folder: Path, change: Callable[[str], str] = str) -> dict[str, Any]:
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert 5 == len(programs)
    program = folder / "program.py"
    program.write_text(change(programs[number]), encoding="utf-8")
    return runpy.run_path(str(program))


def test_the_step_loop_finishes_every_request_with_hits_and_preemptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_program(0, tmp_path)
    log = names["log"]
    assert {"r0", "r1", "r2"} == set(names["finished"])
    assert 0.0 == names["manager"].usage
    assert "admit r0, 0 tokens found" == log[0]
    assert "admit r1, 8 tokens found" in log
    assert any(line.startswith("preempt") for line in log)
    assert "usage at the end: 0%" == capsys.readouterr().out.splitlines()[-1]
    names["manager"].check_valid()


def test_the_window_program_shows_what_its_comments_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_program(1, tmp_path)
    assert [
        "[('layers.0', 'layers.2'), ('layers.1', 'layers.3')] 20",
        "([1, 2, 3, 4], [5, 6, 7, 8])",
        "([1, 2, 3, 4, 9], [0, 0, 7, 8, 10])",
    ] == capsys.readouterr().out.splitlines()
    names["manager"].check_valid()


def test_the_router_gets_the_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_program(2, tmp_path)
    want = "BlockStored [0, 1, 2, 3, 4, 5, 6, 7] [['L'], ['L']] full_attention"
    assert [want] == capsys.readouterr().out.splitlines()


def test_the_program_for_several_workers_shows_their_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_program(3, tmp_path)
    blocks = (3 << 20) // 8192  # of the worker with less memory; a page has 2 * 16 * 2 * 64 * 2 bytes
    lines = capsys.readouterr().out.splitlines()
    assert [f"{blocks} [('layers.0',), ('layers.1',)]", f"{blocks} [('layers.2',), ('layers.3',)]"] == lines[0:4:2]
    windows = (128 - 1 + 512 + 15) // 16 + 1
    assert (blocks - 1 - windows) * 16 == names["longest"]
    assert f"{(2048 + windows + 1) * 8192} {3 << 20} {names['longest']}" == lines[-1]


def test_the_encoder_program_tells_its_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_program(4, tmp_path)
    steps = ["encode ['A'], drop []", "encode ['B'], drop ['A']", "encode ['A'], drop ['B']"]
    assert steps == capsys.readouterr().out.splitlines()
    names["cache"].check_valid()


def test_the_encoder_program_would_raise_if_it_asked_by_can_allocate(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError):
        run_program(4, tmp_path, lambda text: text.replace("cache.reserve(", "cache.can_allocate("))


def test_beyond_max_model_len_success_is_no_room() -> None:
    kv = manager(20, ("full", 4), max_model_len=8)
    req = request("a", range(12))
    assert kv.allocate_slots(req, 8) is not None
    req.num_computed_tokens = 8
    assert kv.empty_kv_cache_blocks is kv.allocate_slots(req, 4)
    assert 2 == len(kv.get_block_ids("a")[0])


def test_claims_of_computed_tokens_are_believed() -> None:
    for claim in ("call", "request"):
        kv, req = manager(20, ("full", 4)), request("a", range(12))
        req.num_computed_tokens = 8 if claim == "request" else 0
        assert kv.allocate_slots(req, 1, 8 if claim == "call" else 0) is not None
        assert (8, 2) == (kv.get_computed_blocks(request("b", range(12)))[1], kv.block_pool.num_cached_keys)


def test_a_look_up_repeated_counts_again_and_preempted_ones_apart() -> None:
    kv, req = manager(20, ("full", 4), log_stats=True), request("a", range(12))
    for _ in range(3):
        kv.get_computed_blocks(req)
    req.num_preemptions = 1
    kv.get_computed_blocks(req)
    stats = kv.make_prefix_cache_stats()
    assert PrefixCacheStats(False, 3, 36, 0, 1, 12, 0) == stats


def test_usage_does_not_count_contents_that_are_only_kept() -> None:
    kv, req = manager(9, ("full", 4)), request("a", range(12))
    admit(kv, req)
    assert (3 / 8, [3]) == (kv.usage, kv.get_num_common_prefix_blocks("a"))
    kv.free(req)
    assert (0.0, 3) == (kv.usage, kv.block_pool.num_cached_keys)


def test_what_an_abandoned_step_was_to_compute_is_found_unless_it_is_evicted() -> None:
    found = []
    for evicts in (False, True):
        kv = manager(20, ("full", 4))
        victim = request("victim", range(13))
        assert kv.allocate_slots(victim, 5) is not None
        victim.num_computed_tokens = 5
        assert kv.allocate_slots(victim, 8) is not None
        if evicts:
            kv.evict_blocks(kv.get_block_ids("victim")[0][victim.num_computed_tokens // 4 :])
        kv.free(victim)
        found.append(kv.get_computed_blocks(request("next", range(13)))[1])
    assert [12, 4] == found
