"""Tables of Arrow, pandas and polars in a store: each column of what is read is the shared memory itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmstore import ObjectStoreReader
from tests.support import Stores, crowd

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; `make test` installs it")
COUNT = 20_000


def read_back(stores: Stores, table: Any) -> tuple[Any, ObjectStoreReader, range]:
    """Store the table, and return what is read of it, by whom, and the addresses of the object."""
    size = pa.MockOutputStream()
    with pa.ipc.new_stream(size, table.schema) as stream:
        stream.write_table(table)
    writer = stores.create(2 << 20)
    reader = stores.attach(writer)
    allocated = pa.total_allocated_bytes()
    with writer.begin("table", np.empty(size.size(), np.uint8)) as begun:
        with pa.ipc.new_stream(pa.FixedSizeBufferWriter(pa.py_buffer(begun.value)), table.schema) as stream:
            stream.write_table(table)
    with reader.find("table") as pin:  # type: ignore[union-attr]
        view = reader.get(pin.ref)
    found = pa.ipc.open_stream(pa.py_buffer(view)).read_all()
    assert allocated == pa.total_allocated_bytes()  # the only copy is that into the store
    crowd(writer)
    return found, reader, range(view.ctypes.data, view.ctypes.data + view.nbytes)


def test_a_table_is_written_with_one_copy_and_read_with_none(stores: Stores) -> None:
    table = pa.table({"id": np.arange(COUNT), "score": np.random.rand(COUNT), "name": [f"n{i}" for i in range(COUNT)]})
    found, reader, place = read_back(stores, table)
    buffers = [buffer for column in found.columns for buffer in column.chunk(0).buffers() if buffer]
    assert 4 == len(buffers)  # the names have offsets, too
    assert [] == [buffer for buffer in buffers if not place.start <= buffer.address <= place.stop - buffer.size]
    assert found.equals(table)
    assert 1 == reader.stats().live_views
    del found, buffers
    assert 0 == reader.stats().live_views


@pytest.mark.parametrize(
    ("library", "scores"),
    [
        ("pandas", lambda _, table: table.to_pandas(zero_copy_only=True, split_blocks=True)["score"].to_numpy()),
        ("polars", lambda polars, table: polars.from_arrow(table)["score"].to_numpy(allow_copy=False)),
    ],
)
def test_a_column_of_pandas_or_polars_is_the_shared_memory(
    stores: Stores, library: str, scores: Callable[[Any, Any], Any]
) -> None:
    module = pytest.importorskip(library, reason=f"{library} is in no extra: it takes a hundred MB")
    found, reader, place = read_back(stores, pa.table({"id": np.arange(COUNT), "score": np.arange(COUNT) / 2}))
    column = scores(module, found)
    del found
    assert column.ctypes.data in place
    assert np.array_equal(np.arange(COUNT) / 2, column)
    del column
    assert 0 == reader.stats().live_views
