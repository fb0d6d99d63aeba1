"""The direction of imports and includes: a layer knows those below it, and nothing else."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "shmstore"
CSRC = ROOT / "csrc"

# What a module of each layer may import from the package: the layer itself, and these. A name stands for all below it.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "bindings": {"errors"},
    "serde": {"errors"},
    "refs": {"errors"},
    "store": {"bindings", "errors", "refs", "serde"},
    "multimodal": {"errors", "refs", "serde", "store", "shmstore"},
    "scheduler": {"bindings.scheduler", "errors"},
}
# Layers on top, which may use everything public.
TOP = {"shmstore", "__main__", "cli", "command", "commands", "inspect", "demo", "metrics"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, text: str | None = None) -> set[str]:
    """Return the dotted names that a file imports anywhere in it, `from x import y` as x and x.y."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(text if text is not None else path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "import_module",
            "importlib.import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            found.add(first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "*")
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "shmstore"


def wrong_imports(path: Path, text: str | None = None) -> list[str]:
    layer = layer_of(module_of(path))
    if layer in TOP:
        return []
    if layer not in ALLOWED:
        return [f"{layer} is in no layer that this test knows"]
    allowed = ALLOWED[layer] | {layer}
    wrong = []
    for name in imports_of(path, text):
        if name == "*":
            wrong.append("imports a module by a computed name")
        if name.split(".")[0] != "shmstore":
            continue
        below = name.removeprefix("shmstore").removeprefix(".")
        if not below:
            # `from shmstore import x` is seen as shmstore and shmstore.x: the latter is what counts.
            if "shmstore" not in allowed and not any(other.startswith("shmstore.") for other in imports_of(path, text)):
                wrong.append("imports the package as a whole")
            continue
        if not any(below == one or below.startswith(one + ".") for one in allowed) and not (
            "shmstore" in allowed and "." not in below and below[0].isupper()
        ):
            if layer == "scheduler" and below == "bindings":
                continue  # seen as well in `from shmstore.bindings import scheduler`
            wrong.append(name)
    return sorted(wrong)


def test_there_are_sources_to_check() -> None:
    layers = {layer_of(module_of(path)) for path in sources()}
    assert {"bindings", "errors", "refs", "serde", "store", "shmstore"} <= layers


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_a_module_imports_only_from_the_layers_below(path: Path) -> None:
    assert [] == wrong_imports(path)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("errors.py", "from shmstore.refs import ObjectRef"),
        ("refs.py", "import shmstore.store"),
        ("refs.py", "from shmstore import store"),
        ("refs.py", "import shmstore"),
        ("serde/decode.py", "from shmstore.bindings import store"),
        ("serde/decode.py", "from ..refs import ObjectRef"),
        ("store/writer.py", "def f():\n    from shmstore.multimodal import cache"),
        ("store/writer.py", "import importlib\nimportlib.import_module('shmstore.multimodal')"),
        ("scheduler/pool.py", "from shmstore.bindings.store import Writer"),
        ("scheduler/pool.py", "from shmstore.bindings import store"),
        ("scheduler/pool.py", "from shmstore import ObjectRef"),
        ("scheduler/pool.py", "from shmstore.store import ObjectStoreWriter"),
        ("scheduler/pool.py", "from shmstore.multimodal import items"),
        ("multimodal/cache.py", "from shmstore.bindings.store import Writer"),
        ("bindings/store.py", "from shmstore.refs import ObjectRef"),
        ("another.py", "import os"),
    ],
)
def test_an_import_that_points_up_is_seen(module: str, text: str) -> None:
    assert [] != wrong_imports(PACKAGE / module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "scheduler/pool.py",
            "from shmstore.bindings.scheduler import Pool\nfrom shmstore.errors import ShmStoreError",
        ),
        ("scheduler/pool.py", "from shmstore.bindings import scheduler"),
        ("multimodal/cache.py", "from shmstore import ObjectRef\nfrom shmstore.store import ObjectStoreWriter"),
        ("store/writer.py", "from shmstore.bindings import store as native\nfrom shmstore.serde import MsgpackSerde"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, text: str) -> None:
    assert [] == wrong_imports(PACKAGE / module, text)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_only_the_bindings_touch_cffi(path: Path) -> None:
    names = {
        name
        for name in imports_of(path)
        if "_shmstore" in name.split(".") or name.split(".")[0] in ("cffi", "_cffi_backend")
    }
    if layer_of(module_of(path)) != "bindings":
        assert set() == names
        tree = ast.parse(path.read_text())
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        }
        assert set() == used & {"ffi", "lib", "cdata"}


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_nothing_uses_what_registers_segments_or_dies_with_its_holder(path: Path) -> None:
    banned = (
        "multiprocessing.shared_memory",
        "multiprocessing.resource_tracker",
        "multiprocessing.Lock",
        "_posixshmem",
    )
    banned += ("multiprocessing.managers", "multiprocessing.synchronize", "posix_ipc", "fcntl")
    if layer_of(module_of(path)) == "demo":  # starts the tracker of multiprocessing's own, which unblocks SIGINT
        banned = tuple(name for name in banned if name != "multiprocessing.resource_tracker")
    assert set() == {name for name in imports_of(path) if name.startswith(banned)}
    calls = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    wrong = {"multiprocessing.Lock", "mp.Lock", "context.Lock", "ctx.Lock", "multiprocessing.RLock", "mp.shared_memory"}
    assert set() == calls & wrong


def test_pickle_is_imported_by_its_own_serializer_alone() -> None:
    below_demo = [path for path in sources() if layer_of(module_of(path)) in ALLOWED]
    users = {
        module_of(path) for path in below_demo if any(n.split(".")[0] in ("pickle", "dill") for n in imports_of(path))
    }
    assert {"shmstore.serde.pickle_serde"} == users


# ---- C

# Headers in order: each may include those of the rows above it only.
ROWS = [
    {"store/step.h", "store/shmstore.h", "store/crc.h", "kv/errors.h"},
    {"store/layout.h", "store/batch.h", "inspect/inspect.h", "kv/hashlist.h"},
    {"store/segment.h", "store/slots.h", "kv/blockhash.h", "kv/blockpool.h"},
    {"store/ring.h", "store/leases.h", "store/index.h", "store/readers.h", "store/ref.h", "kv/blockpool_impl.h"},
    {"store/zones.h", "inspect/inspector.h", "kv/kvcache.h"},
    {"store/writer.h", "kv/kvcache_impl.h"},
]
# What each source may include besides its own header; "store/step.h" names points in the code and is below everything.
SOURCES = {
    "store/copy.c": {"store/shmstore.h"},
    "store/error.c": {"store/shmstore.h"},
    "store/layout.c": set(),
    "store/slots.c": set(),
    "store/segment.c": set(),
    "store/ring.c": set(),
    "store/zones.c": set(),
    "store/leases.c": set(),
    "store/index.c": set(),
    "store/readers.c": set(),
    "store/ref.c": set(),
    "store/reader.c": {"store/readers.h", "store/ref.h", "store/segment.h"},
    "store/writer.c": set(),
    "store/batch.c": {"store/writer.h"},
    "store/tickets.c": {"store/crc.h", "store/writer.h"},
    "store/handouts.c": {"store/writer.h"},
    "store/keys.c": {"store/writer.h"},
    "store/reclaim.c": {"store/writer.h"},
    "store/crc.c": {"store/layout.h"},
    "inspect/probe.c": {"inspect/inspect.h", "store/segment.h", "store/slots.h"},
    "inspect/inspect.c": {"inspect/inspector.h"},
    "inspect/verify.c": {"store/crc.h", "inspect/inspector.h"},
    "kv/errors.c": set(),
    "kv/hashlist.c": set(),
    "kv/blockhash.c": set(),
    "kv/blockpool.c": {"kv/blockpool_impl.h"},
    "kv/kvcache.c": {"kv/kvcache_impl.h"},
}
# Which folders a folder may know.
FOLDERS = {"store": {"store"}, "inspect": {"store", "inspect"}, "kv": {"kv"}}


def named(pattern: str) -> set[str]:
    return {str(path.relative_to(CSRC)) for path in CSRC.glob(pattern)}


def includes(name: str) -> set[str]:
    """Return what a file includes, each with its folder."""
    found = re.findall(r'^\s*#\s*include\s+"([^"]+)"', (CSRC / name).read_text(), flags=re.M)
    return {include if "/" in include else f"{name.split('/')[0]}/{include}" for include in found}


def row_of(header: str) -> int:
    return next(number for number, row in enumerate(ROWS) if header in row)


@pytest.mark.parametrize("header", sorted(set().union(*ROWS)))
def test_a_header_includes_only_headers_of_lower_layers(header: str) -> None:
    for included in includes(header):
        assert row_of(included) < row_of(header), f"{header} includes {included}"


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_a_source_includes_its_own_header_and_what_it_stands_on(source: str) -> None:
    assert includes(source) <= SOURCES[source] | {source.replace(".c", ".h"), "store/step.h"}


def test_every_header_and_source_has_its_place() -> None:
    assert set().union(*ROWS) == named("**/*.h")
    assert set(SOURCES) == {name for name in named("**/*.c") if not name.startswith("_")}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_of_c_knows_only_those_below_it(folder: str) -> None:
    for name in named(f"{folder}/*.[ch]"):
        assert {include.split("/")[0] for include in includes(name)} <= FOLDERS[folder], name


@pytest.mark.parametrize("name", sorted(named("*/*.[ch]")))
def test_there_is_no_python_in_c(name: str) -> None:
    text = (CSRC / name).read_text()
    assert not re.search(r"#\s*include\s*[<\"](Python|structmember|cffi|_cffi|numpy|torch)", text)
    assert not re.search(r"\bPy(Object|_[A-Z]|Gil|GIL|Err_|Mem_)", text)
