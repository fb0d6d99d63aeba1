"""The direction of imports and includes: a layer knows those below it, and nothing else."""

import ast
import inspect
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "shmstore"
CSRC = ROOT / "csrc"

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def section(name: str) -> list[str]:
    return GUIDE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0].strip().splitlines()


def name_of(folder: str) -> str:
    """Return a folder as the picture and imports name it: shmstore/cli/commands is cli.commands, csrc/kv itself."""
    return folder if folder.startswith("csrc/") else folder.removeprefix("shmstore/").replace("/", ".")


ROW = re.compile(r"\| `([^`]+?)/?` \| .+ \| ?(.*) ?\|")
TABLE = [row for line in section("folders") if (row := ROW.match(line))]
# What each row may import besides its own folder. A name stands for all below it.
ALLOWED = {name_of(row[1]): set(re.findall(r"`([^`]+)`", row[2])) for row in TABLE}
# The line of the picture that a name is in, counted from below.
LEVEL = {name: n for n, line in enumerate(reversed(section("layers"))) for name in re.findall(r"[a-z_/]+", line)}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_name_in(module: str, name: str) -> bool:
    """Return whether `name` is a class or function of a module of ours, not itself a module."""
    folder = ROOT.joinpath(*module.split("."))
    return module.split(".")[0] == "shmstore" and not (folder / name).is_dir() and not any(folder.glob(f"{name}.*"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere in it: `from x import y` as x.y, or x if y is no module."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            found |= {base if is_name_in(base, alias.name) else f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "import_module",
            "importlib.import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            found.add(first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "*")
    return found


def row_of_module(module: str) -> str:
    """Return the row that a module belongs to: that of the innermost folder which has one."""
    name = module.removeprefix("shmstore").removeprefix(".") or "__init__"
    return max((row for row in ALLOWED if is_below(name, row)), key=len, default="")


def is_below(name: str, row: str) -> bool:
    return name == row or name.startswith(row + ".")


def wrong_imports(path: Path) -> list[str]:
    row = row_of_module(module_of(path))
    if not row:
        return ["anything, since it is in no row"]
    allowed = ALLOWED[row] | {row.split(".")[0]}
    ours = [name for name in imports_of(path) if name.split(".")[0] in ("shmstore", "*")]
    return sorted(name for name in ours if not any(is_below(name.removeprefix("shmstore."), one) for one in allowed))


def test_every_folder_and_every_module_outside_one_has_its_row() -> None:
    folders = {
        str(path.relative_to(ROOT))
        for top, kind in ((CSRC, "*.[hc]"), (PACKAGE, "*.py"))
        for path in top.rglob("*/")
        if any(path.glob(kind))
    }
    modules = {str(path.relative_to(ROOT).with_suffix("")) for path in PACKAGE.glob("*.py")}
    assert {name_of(name) for name in folders | modules} == set(ALLOWED)


def test_the_picture_shows_every_row_and_no_arrow_of_the_table_points_up_in_it() -> None:
    assert {row.split(".")[0] for row in ALLOWED} == set(LEVEL)
    for row, allowed in ALLOWED.items():
        for below in {one.split(".")[0] for one in allowed}:
            own = row.split(".")[0]
            assert LEVEL["__init__" if below == "shmstore" else below] < LEVEL[own], f"{own} may import {below}"


def test_the_table_allows_only_what_is_imported() -> None:
    used = [(row_of_module(module_of(path)), name) for path in sources() for name in imports_of(path)]
    stale = {
        (row, one)
        for row, allowed in ALLOWED.items()
        for one in allowed
        if not one.startswith("csrc/")
        and not any(user == row and is_below(name.removeprefix("shmstore."), one) for user, name in used)
    }
    assert set() == stale, "no module uses these imports, which the table in CONTRIBUTING.md allows"


def test_a_module_imports_only_from_the_layers_below() -> None:
    wrong = [f"{module_of(path)} may not import {name}" for path in sources() for name in wrong_imports(path)]
    assert [] == wrong, f"{wrong}: see the table under 'Where things live' in CONTRIBUTING.md"


def test_values_know_no_caches() -> None:
    imported = {name for path in (PACKAGE / "multimodal" / "values").glob("*.py") for name in imports_of(path)}
    assert [] == [name for name in imported if is_below(name, "shmstore.multimodal.caches")]


@cache
def attributes_of(path: Path) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}


def test_only_the_bindings_touch_cffi() -> None:
    for path in sources():
        if row_of_module(module_of(path)) == "bindings":
            continue
        imported = imports_of(path)
        assert not any("_shmstore" in name.split(".") for name in imported), path
        assert not any(name.split(".")[0] in ("cffi", "_cffi_backend") for name in imported), path
        assert set() == {"ffi", "lib", "cdata"} & {part for name in attributes_of(path) for part in name.split(".")}, (
            path
        )


def test_nothing_uses_what_registers_segments_or_dies_with_its_holder() -> None:
    banned = {
        *("multiprocessing.shared_memory", "multiprocessing.resource_tracker", "multiprocessing.Lock", "_posixshmem"),
        *("multiprocessing.managers", "multiprocessing.synchronize", "posix_ipc", "fcntl"),
    }
    calls = {"multiprocessing.Lock", "mp.Lock", "context.Lock", "ctx.Lock", "multiprocessing.RLock", "mp.shared_memory"}
    allowed = {
        "shmstore.frontdoor.queue": {"fcntl"},  # its lock says that a folder is in use, and must die with its holders
        "shmstore.tiers.mooncake_client": {"fcntl"},  # a successor waits for its lock, which must die with it
    }
    for path in sources():
        module = module_of(path)
        wrong = tuple(banned - allowed.get(module, set()))
        assert [] == [name for name in imports_of(path) if name.startswith(wrong)], path
        assert set() == calls & attributes_of(path), path


def test_pickle_is_imported_by_its_own_serializer_alone() -> None:
    below_cli = [path for path in sources() if not row_of_module(module_of(path)).startswith("cli")]
    users = {
        module_of(path) for path in below_cli if any(n.split(".")[0] in ("pickle", "dill") for n in imports_of(path))
    }
    assert {"shmstore.serde.pickle_serde"} == users


# ---- C


def named(pattern: str) -> set[str]:
    return {str(path.relative_to(CSRC)) for path in CSRC.glob(pattern)}


def includes(name: str) -> set[str]:
    """Return what a file includes, each with its folder."""
    found = re.findall(r'^\s*#\s*include\s+"([^"]+)"', (CSRC / name).read_text(), flags=re.M)
    return {include if "/" in include else f"{name.split('/')[0]}/{include}" for include in found}


# A public header is put into practice by what is built on it.


def test_headers_include_one_another_in_one_direction() -> None:
    TopologicalSorter({header: includes(header) for header in named("**/*.h")}).prepare()  # CycleError names them


# The line of the picture of csrc/store that a name is in, counted from below.
CORE = {
    name: n
    for n, line in enumerate(line for line in reversed(section("core")) if line[0] == " ")
    for name in re.split(r"\s{2,}", line.strip())[1].split()
}
STORE = sorted(path.name for path in (CSRC / "store").glob("*.[ch]"))
FUNCTION = re.compile(
    r"^(?:static inline )?(?!static)[a-z][\w *]*?\b(shms_\w+)\([^;{}]*\)\s*(\{[^\n]*\}$|\{.*?^\})", re.M | re.S
)


@cache
def code(name: str) -> str:
    """Return a file of csrc/store without comments."""
    return re.sub(r"/\*.*?\*/", "", (CSRC / "store" / name).read_text(), flags=re.S)


def unit(name: str) -> str:
    return name if name in CORE else name.partition(".")[0]


def needs() -> dict[str, set[str]]:
    """Return what each name in the picture includes and calls. What a header only declares, it does not call."""
    homes = {one[1]: unit(name) for name in STORE for one in FUNCTION.finditer(code(name))}
    found: dict[str, set[str]] = {unit(name): set() for name in STORE}
    for name in STORE:
        bodies = code(name) if name.endswith(".c") else "".join(one[2] for one in FUNCTION.finditer(code(name)))
        called = {homes[word] for word in re.findall(r"\bshms_\w+", bodies) if word in homes}
        included = {unit(include.removeprefix("store/")) for include in includes(f"store/{name}")}
        found[unit(name)] |= (called | included) - {unit(name)}
    return found


def test_no_files_of_the_store_call_or_include_one_another_in_a_circle() -> None:
    TopologicalSorter(needs()).prepare()


def test_the_picture_shows_every_file_of_the_store_above_what_it_calls_and_includes() -> None:
    assert set(CORE) == set(needs())
    assert [] == [(name, one) for name, below in needs().items() for one in below if CORE[one] > CORE[name]]


@pytest.mark.parametrize("folder", sorted(row for row in ALLOWED if row.startswith("csrc/")))
def test_a_folder_of_c_includes_only_what_the_table_allows(folder: str) -> None:
    for name in named(f"{folder.removeprefix('csrc/')}/*.[ch]"):
        assert {f"csrc/{include.split('/')[0]}" for include in includes(name)} <= ALLOWED[folder] | {folder}, name


def test_there_is_no_python_in_c() -> None:
    for name in named("*/*.[ch]"):
        text = (CSRC / name).read_text()
        assert not re.search(r"#\s*include\s*[<\"](Python|structmember|cffi|_cffi|numpy|torch)", text), name
        assert not re.search(r"\bPy(Object|_[A-Z]|Gil|GIL|Err_|Mem_)", text), name


PRIVATE = {
    name
    for cls in (ObjectStoreWriter, ObjectStoreReader)
    for name in {*dir(cls), *re.findall(r"self\.(_\w+)", "".join(map(inspect.getsource, cls.__mro__[:-1])))}
    if name.startswith("_") and not name.startswith("__")
}


def private_reaches(text: str) -> list[str]:
    """Return where a private attribute of a writer or reader is taken from anything but `self`, as `a.b._c`."""
    taken = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in PRIVATE]
    return [ast.unparse(node) for node in taken if not (isinstance(node.value, ast.Name) and node.value.id == "self")]


def test_only_the_folder_of_the_store_reaches_into_a_writer_or_reader() -> None:
    assert {"_writer", "_reader", "_put", "_serde", "_handle"} <= PRIVATE
    assert ["writer._writer", "self._writer._put"] == private_reaches("writer._writer; self._writer._put(self._reader)")
    outside = [path for path in sources() if path.parent != PACKAGE / "store" and path.parent != PACKAGE / "bindings"]
    assert [] == [(path.name, found) for path in outside for found in private_reaches(path.read_text())]
