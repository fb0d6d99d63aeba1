"""What works without torch: a test runs this with torch hidden, and `make test-base` where nothing else is installed.

It imports nothing of the tests, which are not installed.
"""

import contextlib
import importlib.util
import io
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import shmstore
from shmstore.cli.main import main
from shmstore.serde.wire import TENSOR
from shmstore.tiers import StoreTier, open_tier


class Foreign(shmstore.MsgpackSerde):
    """Writes what a process with torch writes of a tensor of shape (2, 3)."""

    def encode(self, value: Any) -> Any:
        import msgpack

        array = np.arange(6, dtype="<i2")
        encoded = shmstore.MsgpackSerde().encode(array)
        return encoded._replace(meta=msgpack.packb({"pixels": [TENSOR, "bfloat16", 0, 2, 3]}))


def said(*command: str) -> str:
    """Return what a command that must succeed prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(command) == 0, out.getvalue()
    return out.getvalue()


def refusal(call: Callable[[], Any]) -> shmstore.ShmStoreError:
    """Return the error that `call` raises."""
    try:
        call()
    except shmstore.ShmStoreError as error:
        return error
    raise AssertionError("no error")


def needs_torch(call: Callable[[], Any]) -> None:
    """Check that `call` raises the error that says what to install."""
    error = refusal(call)
    assert isinstance(error, shmstore.MissingExtraError), error
    assert "pip install 'shmstore[torch]'" in str(error)


def arrays_come_back(writer: shmstore.ObjectStoreWriter, reader: shmstore.ObjectStoreReader) -> None:
    item = {"pixels": np.arange(12, dtype=np.float32).reshape(3, 4), "more": [np.zeros(0), (1, "a", np.int8(5))]}
    ref = writer.put("an item", item)
    for copy in (False, True):
        got = reader.get(ref, copy=copy)
        assert (got["pixels"] == item["pixels"]).all()
        assert got["pixels"].flags.writeable is copy
        assert got["more"][1] == (1, "a", 5)
    with writer.reserve("another", {"a": shmstore.TensorSpec((2,), "<i4"), "b": "text"}) as views:
        views["a"][:] = 7
    assert reader.get(writer.get_cached("another"))["a"].tolist() == [7, 7]
    assert "value['a']" in str(refusal(lambda: writer.put("refused", {"a": object()})))


def a_tier_brings_arrays(writer: shmstore.ObjectStoreWriter, reader: shmstore.ObjectStoreReader) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tier = StoreTier(writer, open_tier(f"file://{folder}"))
        writer.put("far", np.ones(9))
        tier.publish("far")
        assert tier.flush(30)
        writer.clear()
        assert tier.fetch("far")
        assert reader.get(writer.get_cached("far")).sum() == 9
        tier.close()


def the_inspector_shows_tensors(name: str) -> None:
    shown = said("dump", name, "--object", "1")
    assert "bfloat16" in shown, shown
    assert "pixels" in shown
    said("verify", name)


def metrics_show_a_store(writer: shmstore.ObjectStoreWriter) -> None:
    from shmstore.metrics import ShmStoreCollector

    samples = [sample for metric in ShmStoreCollector(writer).collect() for sample in metric.samples]
    assert writer.stats().objects in [sample.value for sample in samples if sample.name == "shmstore_objects"]


def run() -> None:
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
            arrays_come_back(writer, reader)
            a_tier_brings_arrays(writer, reader)
            if importlib.util.find_spec("prometheus_client"):
                metrics_show_a_store(writer)
            needs_torch(lambda: reader.get(writer.put("here", np.ones(1)), device="cpu"))
            needs_torch(reader.register_host_memory)
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1, serde=Foreign()) as writer:
        with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
            ref = writer.put("tensors", None)
            the_inspector_shows_tensors(writer.name)
            needs_torch(lambda: reader.get(ref))
    needs_torch(lambda: importlib.import_module("shmstore.multimodal"))


if __name__ == "__main__":
    assert "torch" in sys.modules or importlib.util.find_spec("torch") is None, "this environment has torch"
    run()
    print("shmstore works without torch")
