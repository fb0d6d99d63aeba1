"""Hooks of mkdocs: the tables of guides/metrics.md from shmstore/metrics.py, and the version in the footer."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
METRICS = ROOT / "shmstore" / "metrics.py"


def on_config(config: Any) -> Any:
    """Put the version into the footer, and the project's link to its source, once it has one, on top of each page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = config.copyright.replace("VERSION", project["version"])
    config.repo_url = project.get("urls", {}).get("Source")
    return config


def table(group: str) -> str:
    """Return the table of a group of metrics, such as `_STORE`, from the sources: nothing is imported."""
    (text,) = re.findall(rf"^{group} = (.*?)^\)", METRICS.read_text(encoding="utf-8"), re.M | re.S)
    rows = ["| metric | type | what |", "|---|---|---|"]
    for name, what in re.findall(r'"(shmstore_\w+)",\s*"([^"]+)"', text):
        rows.append(f"| `{name}` | {'counter' if name.endswith('_total') else 'gauge'} | {what} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of their marks."""
    return re.sub(r"^<!-- metrics: (\w+) -->$", lambda mark: table(mark[1]), markdown, flags=re.M)
