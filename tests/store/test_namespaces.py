"""Scopes: a key is found only with its scope, and one scope is emptied without the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmstore import ObjectExistsError, ObjectNotFoundError, ObjectStoreWriter, scopes
from shmstore.inspect import StoreInspector, verify
from shmstore.store.arguments import MAX_KEY, packed_key
from tests.inspect.cases import piped
from tests.support import Leavers, Stores, raises, state

ONE = torch.ones(4)


def fill(writer: ObjectStoreWriter) -> None:
    writer.put("a", ONE)
    writer.put("a", ONE, scope="m1", kind="image")
    writer.put("b", ONE, scope="m1")
    writer.put("a", ONE, scope="m12")
    writer.put("b", ONE)


def test_the_same_key_is_another_object_in_each_scope(stores: Stores) -> None:
    writer = stores.create()
    reader = stores.attach(writer)
    values = {scope: torch.full((3,), float(i)) for i, scope in enumerate((None, "m1", "m2", "ä" * 127))}
    refs = {scope: writer.put("a", value, scope=scope) for scope, value in values.items()}
    for scope, value in values.items():
        assert torch.equal(value, reader.get(refs[scope]))
        assert torch.equal(value, reader.get(writer.get_cached("a", scope=scope)))
        assert writer.is_cached("a", scope=scope)
        assert writer.touch("a", scope=scope)
        assert [scope == other for other in values] == [
            writer.validate(refs[scope], "a", scope=other) for other in values
        ]
    with raises(ObjectExistsError, ["'a'", "'m1'"]):
        writer.put("a", ONE, scope="m1")
    with raises(ObjectNotFoundError, ["'b'", "'m1'"]):
        writer.get_cached("b", scope="m1")
    assert not writer.is_cached("a", scope="m")
    assert not writer.touch("a", scope="m")
    assert not writer.delete("a", scope="m")
    assert writer.delete("a", scope="m1")
    assert [True, False, True, True] == [writer.is_cached("a", scope=scope) for scope in values]
    with writer.reserve("a", ONE, scope="m1") as view:
        view.copy_(ONE)
    assert torch.equal(ONE, reader.get(writer.get_cached("a", scope="m1")))


def test_keys_and_scopes_are_listed_apart_and_counted_together(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    assert ["a", "b"] == writer.keys()
    assert ["a", "b"] == writer.keys(scope="m1")
    assert ["a"] == writer.keys(scope="m12")
    assert [] == writer.keys(scope="m")
    assert ["m1", "m12"] == writer.scopes()
    assert 5 == len(writer)


def test_clear_empties_one_scope_and_no_other(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    writer.clear(scope="m1")
    assert (["a", "b"], [], ["a"]) == (writer.keys(), writer.keys(scope="m1"), writer.keys(scope="m12"))
    assert ["m12"] == writer.scopes()
    writer.clear(scope="m1")
    assert 3 == len(writer)
    writer.clear()
    assert ([], 0) == (writer.scopes(), len(writer))


@pytest.mark.parametrize("scope", ["", "x" * 256, "ä" * 128, "\ud800", 5, b"m1", ("m1",)])
def test_a_scope_that_cannot_be_is_refused_and_changes_nothing(stores: Stores, scope: Any) -> None:
    writer = stores.create()
    fill(writer)
    before = state(writer)
    error: type[Exception] = ValueError if isinstance(scope, str) else TypeError
    calls: list[Callable[[], Any]] = [
        lambda: writer.put("new", ONE, scope=scope),
        lambda: writer.get_cached("a", scope=scope),
        lambda: writer.is_cached("a", scope=scope),
        lambda: writer.touch("a", scope=scope),
        lambda: writer.delete("a", scope=scope),
        lambda: writer.keys(scope=scope),
        lambda: writer.clear(scope=scope),
    ]
    for call in calls:
        with raises(error, ["scope"]):
            call()
    assert before == state(writer)


def test_a_long_key_is_hashed_inside_its_scope(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 20)
    room = MAX_KEY - len(scopes.prefix_of("m1"))
    fits, long = "x" * room, "y" * (room + 1)
    writer.put(fits, ONE, scope="m1")
    writer.put(long, ONE, scope="m1")
    writer.put(long, ONE)
    assert writer.is_cached(long, scope="m1")
    assert [fits, "sha256:"] == [fits, writer.keys(scope="m1")[1][:7]]
    assert fits == writer.keys(scope="m1")[0]
    assert [long] == writer.keys()
    writer.clear(scope="m1")
    assert [long] == writer.keys()


def test_protection_is_of_the_key_in_its_scope(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16)
    value = torch.zeros(1 << 13, dtype=torch.uint8)

    def push_out() -> None:
        for i in range(40):
            writer.cancel(writer.put(f"filler-{i}", value))
        for i in range(40):
            writer.delete(f"filler-{i}")

    for scope in (None, "m1"):
        writer.cancel(writer.put("a", value, scope=scope))
    with writer.protect(["a"], scope="m1"):
        push_out()
        assert (False, True) == (writer.is_cached("a"), writer.is_cached("a", scope="m1"))
    push_out()
    assert not writer.is_cached("a", scope="m1")


def test_what_has_left_names_its_scope(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    left = Leavers(writer)
    writer.delete("a")
    writer.delete("a", scope="m12")
    writer.clear(scope="m1")
    assert ["a", ("m12", "a"), ("m1", "a"), ("m1", "b")] == left.take()


def test_scopes_survive_recover(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    writer.close(unlink=False)
    again = stores.recover(writer.handle)
    assert (["m1", "m12"], ["a", "b"]) == (again.scopes(), again.keys(scope="m1"))
    again.check_valid()


def test_the_commands_show_scopes_and_kinds(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    with StoreInspector.open(writer.name) as inspector:
        found = [(slot.scope, slot.key, slot.kind) for slot in inspector.slots()]
        assert [
            (None, "a", None),
            ("m1", "a", "image"),
            ("m1", "b", None),
            ("m12", "a", None),
            (None, "b", None),
        ] == found
        assert 2 == inspector.find(key="a", scope="m1").object_id
        assert 1 == inspector.find(key="a").object_id
        with raises(ObjectNotFoundError, ["'b'", "'m12'"]):
            inspector.find(key="b", scope="m12")
        assert {"image": 1} == {kind: has.objects for kind, has in inspector.kinds().items()}
    assert verify(writer.name).ok
    text = piped("dump", writer.name).out
    assert all(word in text for word in ("scope", "m12", "kinds", "image"))
    one = piped("dump", writer.name, "--key", "a", "--scope", "m1")
    assert (0, True) == (one.status, "scope m1" in one.out and "kind image" in one.out)
    assert 2 == piped("dump", writer.name, "--scope", "m1").status
    slots = piped("dump", writer.name, "--json").json["snapshot"]["slots"]
    assert [None, "m1", "m1", "m12", None] == [slot["scope"] for slot in slots]
    top = piped("top", writer.name, "--iterations", "1")
    assert "image" in top.out
    assert 0 == piped("ls").status


def test_without_kinds_and_scopes_no_column_is_spent_on_them(stores: Stores) -> None:
    writer = stores.create()
    writer.put("a", ONE)
    text = piped("dump", writer.name).out
    assert "scope" not in text
    assert "kind" not in text


@pytest.mark.parametrize(
    "stored", [b"\xff", b"\xff\x00a", b"\xff\x05abc", b"\xff\x02ab", b"\xff\x02\xff\xffa", b"\xfe"]
)
def test_bytes_that_no_writer_stores_are_shown_and_never_fail_an_inspection(stores: Stores, stored: bytes) -> None:
    with pytest.raises(UnicodeDecodeError):
        scopes.split(stored)
    scope, key = scopes.split(stored, errors="backslashreplace")
    assert "\\xf" in f"{scope}{key}"
    writer = stores.create()
    batch = writer._writer.new_batch()
    batch.put(stored, b"", 0, ())
    batch.record.keep = 1
    with StoreInspector.open(writer.name) as inspector:
        assert [(scope, key)] == [(slot.scope, slot.key) for slot in inspector.slots()]
    assert 0 == piped("dump", writer.name).status


def test_a_stored_key_of_a_scope_is_split_into_what_it_was_made_of() -> None:
    for scope in ("m", "x" * 255, "\0", "ÿ", "a/b"):
        for key in ("k", "ÿk", "\0"):
            assert (scope, key) == scopes.split(packed_key(key, scope))
    assert (None, "ÿ") == scopes.split(packed_key("ÿ"))
