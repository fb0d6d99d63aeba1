"""Builds ``shmstore.bindings._shmstore``, the one door between Python and C.

Each public header marks the part that Python may call with ``cdef: begin`` and ``cdef: end``; the
declarations are taken from there, so that no signature is written twice.
"""

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = (
    *("store/shmstore.h", "store/core.h", "store/batch.h", "store/claims.h", "store/crc.h", "inspect/inspect.h"),
    *("serde/fold.h", "kv/errors.h", "kv/hashlist.h", "kv/blockhash.h", "kv/blockpool.h", "kv/kvcache.h"),
)
EXTENSION = ("inspect", "kv", "serde")  # the store is compiled once, for programs in C, too
# The hosts that the package supports are little-endian Linux; anything else must fail here, not at run time.
# -g0, because archives are not stripped, and debug information has the paths of the machine that built them.
COMPILE_ARGS = ["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-D_GNU_SOURCE", "-pthread"]


def declarations(header: Path) -> str:
    """Return the text between the ``cdef`` marks of `header`, without comments."""
    text = header.read_text(encoding="utf-8")
    parts = re.findall(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", text, flags=re.S)
    if not parts:
        raise ValueError(f"{header.name} marks nothing as cdef")
    return re.sub(r"/\*.*?\*/", "", "\n".join(parts), flags=re.S)


ffibuilder = FFI()
for _name in HEADERS:
    ffibuilder.cdef(declarations(HERE / _name))
ffibuilder.set_source(
    "shmstore.bindings._shmstore",
    "\n".join(f'#include "{name}"' for name in HEADERS),
    sources=sorted(f"csrc/{path.relative_to(HERE)}" for name in EXTENSION for path in HERE.glob(f"{name}/*.c")),
    depends=sorted(f"csrc/{path.relative_to(HERE)}" for path in HERE.glob("*/*.[ch]")),
    include_dirs=["csrc"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-Wl,-Bsymbolic"],  # else a program's libshmstore.so would be used in place of what is in here
    py_limited_api=True,
)
