"""Print what CHANGELOG.md says of a version: `python -m release.notes v0.1.0` gives the text of its release."""

import re
import sys

from release.version import ROOT, version_in


def notes(version: str) -> str:
    """Return the section of a version.

    SystemExit if it is not the version of the package, or if CHANGELOG.md has no such section with a date.
    """
    ours = version_in("pyproject.toml")
    if version != ours:
        sys.exit(f"the tag is for {version}, and pyproject.toml has {ours}")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.+?)(?=^## |\Z)", text, re.M | re.S)
    if not found:
        sys.exit(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    return found[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1].removeprefix("v")))
