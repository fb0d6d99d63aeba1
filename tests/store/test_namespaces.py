"""Namespaces: a key is found only with its namespace, and one namespace is emptied without the others."""

import pytest
import torch

from shmstore import ObjectExistsError, ObjectNotFoundError, ObjectStoreWriter, namespaces
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.verify import verify
from shmstore.store.arguments import MAX_KEY, packed_key
from tests.inspect.cases import piped
from tests.support import Stores, raises

ONE = torch.ones(4)


def fill(writer: ObjectStoreWriter) -> None:
    writer.put("a", ONE)
    writer.put("a", ONE, namespace="m1", kind="image")
    writer.put("b", ONE, namespace="m1")
    writer.put("a", ONE, namespace="m12")
    writer.put("b", ONE)


def test_the_same_key_is_another_object_in_each_namespace(stores: Stores) -> None:
    writer = stores.create()
    reader = stores.attach(writer)
    values = {namespace: torch.full((3,), float(i)) for i, namespace in enumerate((None, "m1", "m2", "ä" * 127))}
    refs = {namespace: writer.put("a", value, namespace=namespace) for namespace, value in values.items()}
    for namespace, value in values.items():
        assert torch.equal(value, reader.get(refs[namespace]))
        assert torch.equal(value, reader.get(writer.get_cached("a", namespace=namespace)))
        assert writer.is_cached("a", namespace=namespace)
        assert writer.touch("a", namespace=namespace)
        assert [namespace == other for other in values] == [
            writer.validate(refs[namespace], "a", namespace=other) for other in values
        ]
    with raises(ObjectExistsError, ["'a'", "'m1'"]):
        writer.put("a", ONE, namespace="m1")
    with raises(ObjectNotFoundError, ["'b'", "'m1'"]):
        writer.get_cached("b", namespace="m1")
    assert not writer.is_cached("a", namespace="m")
    assert not writer.touch("a", namespace="m")
    assert not writer.delete("a", namespace="m")
    assert writer.delete("a", namespace="m1")
    assert [True, False, True, True] == [writer.is_cached("a", namespace=namespace) for namespace in values]
    with writer.reserve("a", ONE, namespace="m1") as view:
        view.copy_(ONE)
    assert torch.equal(ONE, reader.get(writer.get_cached("a", namespace="m1")))


def test_keys_and_namespaces_are_listed_apart_and_counted_together(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    assert ["a", "b"] == writer.keys()
    assert ["a", "b"] == writer.keys(namespace="m1")
    assert ["a"] == writer.keys(namespace="m12")
    assert [] == writer.keys(namespace="m")
    assert ["m1", "m12"] == writer.namespaces()
    assert 5 == len(writer)


def test_clear_empties_one_namespace_and_no_other(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    writer.clear(namespace="m1")
    assert (["a", "b"], [], ["a"]) == (writer.keys(), writer.keys(namespace="m1"), writer.keys(namespace="m12"))
    assert ["m12"] == writer.namespaces()
    writer.clear(namespace="m1")
    assert 3 == len(writer)
    writer.clear()
    assert ([], 0) == (writer.namespaces(), len(writer))


def test_a_long_key_is_hashed_inside_its_namespace(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 20)
    room = MAX_KEY - len(namespaces.prefix_of("m1"))
    fits, long = "x" * room, "y" * (room + 1)
    writer.put(fits, ONE, namespace="m1")
    writer.put(long, ONE, namespace="m1")
    writer.put(long, ONE)
    assert writer.is_cached(long, namespace="m1")
    assert [fits, "sha256:"] == [fits, writer.keys(namespace="m1")[1][:7]]
    assert fits == writer.keys(namespace="m1")[0]
    assert [long] == writer.keys()
    writer.clear(namespace="m1")
    assert [long] == writer.keys()


def test_protection_is_of_the_key_in_its_namespace(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16)
    value = torch.zeros(1 << 13, dtype=torch.uint8)

    def push_out() -> None:
        for i in range(40):
            writer.cancel(writer.put(f"filler-{i}", value))
        for i in range(40):
            writer.delete(f"filler-{i}")

    for namespace in (None, "m1"):
        writer.cancel(writer.put("a", value, namespace=namespace))
    with writer.protect(["a"], namespace="m1"):
        push_out()
        assert (False, True) == (writer.is_cached("a"), writer.is_cached("a", namespace="m1"))
    push_out()
    assert not writer.is_cached("a", namespace="m1")


def test_the_commands_show_namespaces_and_kinds(stores: Stores) -> None:
    writer = stores.create()
    fill(writer)
    with StoreInspector.open(writer.name) as inspector:
        found = [(slot.namespace, slot.key, slot.kind) for slot in inspector.slots()]
        assert [
            (None, "a", None),
            ("m1", "a", "image"),
            ("m1", "b", None),
            ("m12", "a", None),
            (None, "b", None),
        ] == found
        assert 2 == inspector.find(key="a", namespace="m1").object_id
        assert 1 == inspector.find(key="a").object_id
        with raises(ObjectNotFoundError, ["'b'", "'m12'"]):
            inspector.find(key="b", namespace="m12")
        assert {"image": 1} == {kind: has.objects for kind, has in inspector.kinds().items()}
    assert verify(writer.name).ok
    text = piped("dump", writer.name).out
    assert all(word in text for word in ("namespace", "m12", "kinds", "image"))
    one = piped("dump", writer.name, "--key", "a", "--namespace", "m1")
    assert (0, True) == (one.status, "namespace m1" in one.out and "kind image" in one.out)
    assert 2 == piped("dump", writer.name, "--namespace", "m1").status
    slots = piped("dump", writer.name, "--json").json["snapshot"]["slots"]
    assert [None, "m1", "m1", "m12", None] == [slot["namespace"] for slot in slots]
    top = piped("top", writer.name, "--iterations", "1")
    assert "image" in top.out
    assert 0 == piped("ls").status


def test_without_kinds_and_namespaces_no_column_is_spent_on_them(stores: Stores) -> None:
    writer = stores.create()
    writer.put("a", ONE)
    text = piped("dump", writer.name).out
    assert "namespace" not in text
    assert "kind" not in text


@pytest.mark.parametrize(
    "stored", [b"\xff", b"\xff\x00a", b"\xff\x05abc", b"\xff\x02ab", b"\xff\x02\xff\xffa", b"\xfe"]
)
def test_a_key_that_is_not_text_keeps_nobody_from_the_others_of_its_store(stores: Stores, stored: bytes) -> None:
    namespace, key = namespaces.split(stored)
    assert "\\xf" in f"{namespace}{key}"
    writer = stores.create()
    writer.put("k", ONE, namespace="n")
    batch = writer._writer.new_batch()
    batch.put(stored, b"", 0, ())
    batch.record.keep = 1
    pairs = [("n", "k"), (namespace, key)]
    assert [key] * (namespace is None) == writer.keys()
    assert [of for of, _ in pairs if of is not None] == writer.namespaces()
    assert ["k"] == writer.keys(namespace="n")
    with StoreInspector.open(writer.name) as inspector:
        assert pairs == [(slot.namespace, slot.key) for slot in inspector.slots()]
    assert 0 == piped("dump", writer.name).status


def test_a_stored_key_of_a_namespace_is_split_into_what_it_was_made_of() -> None:
    for namespace in ("m", "x" * 255, "\0", "ÿ", "a/b"):
        for key in ("k", "ÿk", "\0"):
            assert (namespace, key) == namespaces.split(packed_key(key, namespace))
    assert (None, "ÿ") == namespaces.split(packed_key("ÿ"))
