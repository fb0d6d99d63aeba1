"""What a release says of itself; `python -m release.version 0.1.0` writes the version everywhere, and the day."""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "pyproject.toml": r'^version = "(.+)"',
    "shmstore/__init__.py": r'^__version__ = "(.+)"',
    "csrc/store/shmstore.h": r'^#define SHMSTORE_VERSION "(.+)"',
    "rust/shmstore-sys/Cargo.toml": r'^version = "(.+)"',
    "rust/shmstore/Cargo.toml": r'^version = "(.+)"',
    "CITATION.cff": r"^version: (.+)",
    "CHANGELOG.md": r"^## \[(.+?)\]",
}
"""Each file, and what stands before and after the version in it: the first of its kind."""


def _found(name: str, root: Path) -> re.Match[str]:
    found = re.search(PLACES[name], (root / name).read_text(encoding="utf-8"), re.M)
    return found or sys.exit(f"{name} has no line like {PLACES[name]}")


def version_in(name: str, root: Path = ROOT) -> str:
    """Return the version in one of the `PLACES`; SystemExit if there is none."""
    return _found(name, root)[1]


def write(version: str, date: str, root: Path = ROOT) -> None:
    """Write a version into all `PLACES`, and the date of its section."""
    for name in PLACES:
        start, end = _found(name, root).span(1)
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(text[:start] + version + text[end:], encoding="utf-8")
    path = root / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"^(## \[.+?\] - ).+", rf"\g<1>{date}", text, count=1, flags=re.M), encoding="utf-8")


def name_source(folder: Path, url: str) -> None:
    """Write into a tree where its source is, for an index: the project's links, and the README's made absolute."""
    version = version_in("pyproject.toml", folder)
    at = f"{url}/blob/v{version}"
    readme = folder / "README.md"
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{url}/raw/v{version}/", readme.read_text(encoding="utf-8"))
    readme.write_text(re.sub(r"\]\((?![a-z]+:|#)", f"]({at}/", text), encoding="utf-8")
    links = {"Source": url, "Issues": f"{url}/issues", "Changelog": f"{at}/CHANGELOG.md"}
    with (folder / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n[project.urls]\n" + "".join(f'{name} = "{link}"\n' for name, link in links.items()))


if __name__ == "__main__":
    write(sys.argv[1], time.strftime("%Y-%m-%d", time.gmtime()))
