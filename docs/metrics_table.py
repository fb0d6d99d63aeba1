"""Makes the tables of guides/metrics.md from shmstore/metrics.py; a hook of mkdocs."""

import re
from pathlib import Path
from typing import Any

METRICS = Path(__file__).resolve().parent.parent / "shmstore" / "metrics.py"


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
