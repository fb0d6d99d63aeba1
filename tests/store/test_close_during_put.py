"""A writer that is closed while bytes are still being written stays the writer until they are not."""

import os

import numpy as np
import pytest

from shmstore import ObjectStoreWriter, StoreClosedError, WriterActiveError


def test_a_successor_comes_only_when_the_last_reservation_has_ended() -> None:
    name = f"closed-early-{os.getpid()}"
    writer = ObjectStoreWriter.create(name, capacity=6400, n_readers=1)
    writer.put("whole", np.arange(8))
    with pytest.raises(StoreClosedError), writer.reserve("half", np.zeros(100, np.uint8)) as views:
        writer.close(unlink=False)
        with pytest.raises(WriterActiveError):
            ObjectStoreWriter.recover(name)
        views[:] = 1
    with ObjectStoreWriter.recover(name) as successor:
        assert successor.keys() == ["whole"]
        successor.check_valid()
