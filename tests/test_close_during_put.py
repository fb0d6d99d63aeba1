"""A writer that is closed while it puts keeps its successor out until the last byte is written."""

import pytest
import torch

from shmstore import ObjectStoreWriter, StoreClosedError, TensorSpec, WriterActiveError


def test_a_close_inside_reserve_keeps_the_lock_until_the_block_ends() -> None:
    writer = ObjectStoreWriter.create(capacity=1 << 16, n_readers=1)
    writer.put("before", torch.arange(4))
    block = writer.reserve("late", {"x": TensorSpec((16,), torch.float32)})
    views = block.__enter__()
    writer.close(unlink=False)
    views["x"].fill_(1.0)
    with pytest.raises(WriterActiveError):
        ObjectStoreWriter.recover(writer.name)
    with pytest.raises(StoreClosedError):
        block.__exit__(None, None, None)
    with ObjectStoreWriter.recover(writer.name) as successor:
        assert successor.keys() == ["before"]
        successor.check_valid()
