"""The leases of requests, without an engine: a lease lasts as long as a worker may read its item."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.engine import EngineCoreRequestType, FinishReason

from shmstore.integrations.vllm.items import ref_of
from shmstore.integrations.vllm.requests import RequestLeases, follow_engines
from tests.vllm.parts import FIELDS, Desk, item


def test_a_lease_ends_when_the_core_has_finished_its_request(desk: Desk) -> None:
    desk.request("a")
    desk.output("a")
    assert 1 == desk.opened
    desk.output("a", finished=True)
    assert 0 == desk.opened


def test_the_children_of_a_request_share_its_lease_until_the_last_has_ended(desk: Desk) -> None:
    desk.request("a", children=3)
    for child in (1, 0):
        desk.output(f"{child}_a", finished=True)
        assert 1 == desk.opened
    desk.output("2_a", finished=True)
    assert 0 == desk.opened


def test_a_lease_of_an_aborted_request_lasts_until_a_later_one_has_a_token(desk: Desk) -> None:
    for name in "abc":
        desk.request(name)
    desk.abort_requests(["b"])
    desk.output("a")
    desk.output("c")  # both were there before
    assert 3 == desk.opened
    desk.request("d")
    desk.output("d", tokens=())  # not a token yet
    assert 4 == desk.opened
    desk.output("d")
    assert 3 == desk.opened


class Client:
    """The part of `AsyncMPClient` that the plug-in wraps."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def _send_input(self, request_type: Any, request: Any, engine: bytes | None = None) -> str:
        self.sent.append((request_type, request, engine))
        return "sent"


follow_engines(Client)


def test_a_token_of_another_engine_says_nothing_about_an_aborted_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestLeases, "engines", {})
    client = Client()
    for name, engine in (("a", b"0"), ("b", b"1"), ("unsent", None), ("c", b"1"), ("d", b"0")):
        if name == "c":
            desk.abort_requests(["a", "b", "unsent"])
            assert 3 == desk.opened
        desk.request(name)
        if engine:
            request = SimpleNamespace(request_id=name)
            assert "sent" == client._send_input(EngineCoreRequestType.ADD, request, engine)
            assert client.sent[-1] == (EngineCoreRequestType.ADD, request, engine)
    desk.output("c")
    assert 3 == desk.opened  # a, c and d: b was sent to the engine of c, and `unsent` to none
    assert {"d"} == desk.books.later  # only first tokens are looked at
    desk.output("d")
    assert 2 == desk.opened
    for name in "cd":
        desk.output(name, finished=True)
    client._send_input(EngineCoreRequestType.ABORT, ["c"], b"0")
    client._send_input(EngineCoreRequestType.ADD, SimpleNamespace(request_id="unknown"), b"0")
    assert {} == RequestLeases.engines


def test_an_embedding_is_as_good_as_a_token(desk: Desk) -> None:
    for name in "ab":
        desk.request(name)
        desk.abort_requests([name])
    desk.request("c")
    desk.output("c", tokens=(), pooled=torch.zeros(1), finished=True)
    assert 0 == desk.opened


def test_an_item_that_was_sent_itself_is_not_kept(desk: Desk) -> None:
    feature = SimpleNamespace(data=item(*FIELDS))
    seen = weakref.ref(feature.data)
    desk.add_request(SimpleNamespace(request_id="a", mm_features=[feature]))
    feature.data = None
    assert seen() is None


def test_the_methods_return_what_they_returned_and_a_text_has_no_items(desk: Desk) -> None:
    assert "added" == desk.add_request(SimpleNamespace(request_id="text", mm_features=None))
    assert "processed" == desk.output("text")
    assert ["text"] == desk.abort_requests(["text", "unknown"])


@pytest.mark.parametrize("aborted", [False, True])
def test_a_lease_ends_with_its_request_whatever_keeps_the_item(desk: Desk, aborted: bool) -> None:
    features = [SimpleNamespace(data=desk.item("a"))]
    desk.add_request(SimpleNamespace(request_id="a", mm_features=features))
    if aborted:
        desk.abort_requests(["a"])
        desk.request("b")
        desk.output("b")
        desk.output("b", finished=True)
    else:
        desk.output("a", finished=True)
    assert 0 == desk.opened


def test_a_later_request_for_an_item_opens_a_lease_of_its_own(desk: Desk) -> None:
    sent = desk.item("a")
    request = SimpleNamespace(request_id="step", mm_features=[SimpleNamespace(data=sent)])
    for _ in range(3):  # as a beam search does
        desk.add_request(request)
        assert 1 == desk.opened
        assert desk.writer.validate(cast(Any, ref_of(sent)), "a")
        desk.output("step", finished=True)
        assert 0 == desk.opened
    desk.writer.delete("a")
    with pytest.raises(ValueError, match="'a'"):
        desk.add_request(request)
    assert {} == desk.request_states


def test_texts_enter_no_table_unless_a_token_is_awaited(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestLeases, "engines", {})

    def text(name: str) -> None:
        desk.add_request(SimpleNamespace(request_id=name, mm_features=None))
        desk.output(name)

    text("before")
    desk.output("before", finished=True)
    assert [None] == [desk.books]
    desk.request("a")
    text("gone")
    desk.abort_requests(["gone"])
    text("beside")
    assert {} == desk.books.aborted
    assert ["a"] == [*desk.books.sent]
    desk.abort_requests(["a"])
    desk.output("beside")
    assert 1 == desk.opened
    desk.add_request(SimpleNamespace(request_id="silent", mm_features=None))
    desk.abort_requests(["silent"])
    assert set() == desk.books.later
    text("after")  # its token says that the workers are past `a`
    assert 0 == desk.opened
    assert ({}, {}, {}) == (desk.books.sent, desk.books.aborted, RequestLeases.engines)


@pytest.mark.parametrize("waits", [False, True], ids=["nothing", "a hung-up request"])
def test_a_step_of_texts_does_nothing_but_vllms_own(desk: Desk, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    desk.request("a")
    if waits:
        desk.abort_requests(["a"])
    else:
        desk.output("a", finished=True)

    class Unread:
        def __iter__(self) -> Any:
            pytest.fail("the plug-in looks at each output")

    outputs: Any = Unread()
    monkeypatch.setattr(desk, "own_outputs", lambda given: given, raising=False)
    assert outputs is desk.process_outputs(outputs)


def test_the_last_part_of_a_stream_ends_the_leases_of_all_parts(desk: Desk) -> None:
    desk.request("stream")
    desk.request("b")
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=None, last=True))
    assert 1 == desk.opened


def test_a_token_of_a_streams_first_part_ends_no_lease_from_before_its_second(desk: Desk) -> None:
    desk.request("stream")
    desk.request("b")
    desk.abort_requests(["b"])
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=[SimpleNamespace(data=desk.item("second"))]))
    desk.output("stream")
    assert 3 == desk.opened
    desk.request("c")
    desk.output("c")
    assert 3 == desk.opened
    desk.output("stream", finished=True)
    assert 1 == desk.opened


def test_a_token_of_a_streams_text_says_nothing_about_what_came_before_its_item(desk: Desk) -> None:
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=None))
    desk.request("b")
    desk.abort_requests(["b"])
    desk.add_request(SimpleNamespace(request_id="stream", mm_features=[SimpleNamespace(data=desk.item("second"))]))
    desk.output("stream")
    assert 2 == desk.opened


@pytest.mark.parametrize("ended_by", ["a stop string", "the core's abort"])
def test_a_request_that_ends_otherwise_may_be_on_its_way_to_the_workers(desk: Desk, ended_by: str) -> None:
    desk.request("a")
    if ended_by == "a stop string":
        desk.stopped = ("a",)
        desk.output("a")
    else:
        desk.output("a", finished=True, reason=FinishReason.ABORT)
    assert 1 == desk.opened
    desk.request("b")
    desk.output("b", finished=True)
    assert 0 == desk.opened


def test_an_item_that_nobody_has_sent_ends_its_lease(desk: Desk) -> None:
    sent = desk.item("a")
    assert 1 == desk.opened
    del sent
    assert 0 == desk.opened


def test_two_processors_know_nothing_of_each_other(desk: Desk) -> None:
    other = Desk(desk.writer)
    desk.request("a")
    other.add_request(SimpleNamespace(request_id="a", mm_features=[]))
    other.output("a", finished=True)
    assert 1 == desk.opened
