"""The errors: what a caller catches, reads and pickles."""

import errno
import pickle
from typing import Any

import pytest

from shmstore import errors
from shmstore.errors import (
    CacheMissError,
    ForeignStoreError,
    SharedMemoryError,
    ShmStoreError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    StoreSpaceError,
    UnsupportedValueError,
)

BUILT_IN = {
    "StoreFullError": MemoryError,
    "ObjectTooLargeError": ValueError,
    "ObjectExistsError": ValueError,
    "ObjectNotFoundError": KeyError,
    "ReservationEndedError": RuntimeError,
    "StaleRefError": ValueError,
    "StoreNotFoundError": FileNotFoundError,
    "StoreExistsError": FileExistsError,
    "StoreSpaceError": OSError,
    "SharedMemoryError": OSError,
    "ForeignStoreError": PermissionError,
    "WriterActiveError": RuntimeError,
    "NoArenaError": RuntimeError,
    "RankInUseError": RuntimeError,
    "LayoutMismatchError": ValueError,
    "CorruptStoreError": ValueError,
    "ObjectBusyError": TimeoutError,
    "TierError": ConnectionError,
    "TierFullError": ConnectionError,
    "SparseStoreError": ValueError,
    "StoreClosedError": ValueError,
    "CacheMissError": LookupError,
    "UnknownTypeError": ValueError,
    "UnsupportedValueError": TypeError,
    "NestingError": ValueError,
    "DeviceError": RuntimeError,
    "MissingExtraError": ImportError,
}
CLASSES: list[type[Any]] = [getattr(errors, name) for name in BUILT_IN]


def test_every_public_error_is_in_the_table_of_this_test() -> None:
    assert sorted([*BUILT_IN, "ShmStoreError"]) == sorted(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_error_is_what_one_would_catch_has_a_hint_and_prints_as_given(cls: type[Any]) -> None:
    error = cls()
    assert isinstance(error, ShmStoreError)
    assert isinstance(error, BUILT_IN[cls.__name__])
    assert error.hint not in ("", ShmStoreError.default_hint)
    assert str(error) == f"{error.message} (hint: {error.hint})"
    assert "\n" not in str(error)
    given = cls(message="no 'x' here", hint="look there")
    assert (given.message, given.hint) == ("no 'x' here", "look there")
    assert str(given) == "no 'x' here (hint: look there)"  # without quotes and numbers


def test_the_messages_that_the_contract_names_are_the_defaults() -> None:
    assert "already exists in the storage" in str(errors.ObjectExistsError())
    assert "has been modified or is invalid" in str(errors.StaleRefError())


EXAMPLES = [
    *(cls() for cls in CLASSES),
    StoreFullError(needed=10, held_bytes_by_rank={0: 5, 3: 7}),
    SharedMemoryError(number=errno.EROFS),
    CacheMissError(("a",), "gone", hint="again"),
    UnsupportedValueError("value[1]: no serializer for Foo", path="value[1]"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: f"{type(e).__name__}-{e.message[:20]}")
def test_an_error_pickles_with_every_attribute(error: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is type(error)
        assert back.args == error.args
        assert back.__dict__ == error.__dict__
        assert str(back) == str(error)
        assert getattr(back, "errno", None) == getattr(error, "errno", None)
        assert getattr(back, "strerror", None) == getattr(error, "strerror", None)


def test_a_cache_miss_carries_every_missing_hash_in_order() -> None:
    error = CacheMissError(iter(["b", "a"]))
    assert error.mm_hashes == ("b", "a")
    assert "b, a" in str(error)


def test_file_errors_carry_the_number_that_callers_compare() -> None:
    assert StoreNotFoundError("gone").errno == errno.ENOENT
    assert StoreExistsError("there").errno == errno.EEXIST
    assert StoreSpaceError(needed=2, free=1).errno == errno.ENOSPC
    assert SharedMemoryError(number=errno.EROFS).errno == errno.EROFS
    assert ForeignStoreError().errno == errno.EACCES
