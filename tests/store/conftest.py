"""A fixture for tests whose stores outlive a writer."""

from collections.abc import Iterator

import pytest

from tests.support import SHM, store_name


@pytest.fixture
def name() -> Iterator[str]:
    """Return a name for a store, and remove what has it in the end."""
    made = store_name()
    yield made
    (SHM / made).unlink(missing_ok=True)
