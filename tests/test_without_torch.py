"""torch is an extra: what needs none of it works without it, and imports it only for a tensor."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import Stores

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


def ran(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_stores_tiers_and_the_inspector_work_where_torch_is_not_installed() -> None:
    """`.ci/run` runs the same program in an environment that has only what `pip install .` brings."""
    assert "without torch\n" in ran(HIDDEN, str(ROOT / "tests" / "without_torch.py"))


def test_arrays_import_no_torch_and_only_commands_that_draw_import_rich() -> None:
    loaded = ran("""
import sys
import numpy as np
import shmstore
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
        assert reader.get(writer.put("a", {"a": np.ones(3), "b": (None, np.float32(1))}))["a"].sum() == 3
import shmstore.inspect.verify, shmstore.tiers, shmstore.scheduler
print(*{"torch", "rich"}.intersection(sys.modules))
""")
    assert "\n" == loaded


VALUES = {
    "dict": "{'a': torch.arange(6), 'b': torch.ones(2, dtype=torch.bfloat16)}",
    "size": "(torch.Size([2, 3]),)",
    "parameter": "torch.nn.Parameter(torch.ones(2))",
}
PUT_LATE = """
import os, sys
import numpy as np
import shmstore
def shown(*values):
    with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
            return [repr(reader.get(writer.put(str(number), value))) for number, value in enumerate(values)]
shown({"a": np.ones(2)})
import torch
for text in sys.argv[1:]:
    if (child := os.fork()) == 0:  # in which no value of torch has been put
        print(*shown(*[eval(text)] * 2), sep="\\n", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
GET_LATE = """
import sys
import shmstore
with shmstore.ObjectStoreReader.attach(sys.argv[1]) as reader:
    print(repr(reader.get(shmstore.ObjectRef.from_bytes(bytes.fromhex(sys.argv[2])))))
"""
REGISTER_LATE = """
import torch
import shmstore.serde
for cls in (torch.Tensor, torch.nn.Parameter, torch.Size):
    try:
        shmstore.serde.register_type("mine", cls, list, list)
    except ValueError:
        print("refused")
"""


def text_of(value: Any) -> str:
    return f"{value.data if isinstance(value, torch.nn.Parameter) else value!r}\n"


def test_a_tensor_is_known_however_late_torch_is_imported() -> None:
    assert "".join(text_of(eval(text)) * 2 for text in VALUES.values()) == ran(PUT_LATE, *VALUES.values())


@pytest.mark.parametrize("text", [VALUES["dict"], VALUES["size"]], ids=["dict", "size"])
def test_a_tensor_is_read_before_anybody_has_imported_torch(text: str, stores: Stores) -> None:
    value = eval(text)
    writer = stores.create()
    assert text_of(value) == ran(GET_LATE, writer.name, writer.put("a", value).to_bytes().hex())


def test_a_type_of_torch_is_part_of_the_format_before_the_first_tensor() -> None:
    assert "refused\n" * 3 == ran(REGISTER_LATE)
