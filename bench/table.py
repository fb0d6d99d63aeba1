"""Print the figures of a pytest-benchmark JSON file as a table: measured, reference, ratio, limit.

Run ``pytest bench --benchmark-only --benchmark-json=out.json && python bench/table.py out.json``.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any


def figures(path: str) -> Iterator[tuple[str, str, str, str, bool]]:
    """Yield (figure, measured, reference, limit, reached) for each benchmark of the file."""
    with open(path, encoding="utf-8") as file:
        results = json.load(file)["benchmarks"]
    gets = []
    for result in results:
        info: dict[str, Any] = result["extra_info"]
        if "figure" not in info:
            continue
        measured_us = result["stats"]["median"] * 1e6
        name, kind, limit = info["figure"], info["kind"], info["limit"]
        if kind == "value":
            yield name, f"{info['value']:.0f}", "", f"{limit:.0f}", info["value"] <= limit
        elif kind == "measured":
            other = f"{info['other']:.2f} us, x {info['value'] / info['other']:.3f}" if info["other"] else ""
            yield name, f"{info['value']:.2f} us", other, f"{limit:g} us", info["value"] <= limit
        elif kind == "time":
            yield name, f"{measured_us:.2f} us", "", f"{limit:g} us", measured_us <= limit
            if name.startswith("get, ") and name.endswith("iB"):
                gets.append(measured_us)
        else:
            reference = info["reference_us"]
            got = measured_us / reference if kind == "ratio" else measured_us - reference
            shown = f"x {got:.2f}" if kind == "ratio" else f"{got:+.2f} us"
            goal = f"x {limit:g}" if kind == "ratio" else f"{limit:+g} us"
            yield name, f"{measured_us:.2f} us", f"{reference:.2f} us, {shown}", goal, got <= limit
    if gets:
        spread = max(gets) / min(gets)
        yield "get, slowest size against fastest", f"x {spread:.2f}", "", "x 1.2", spread <= 1.2


def main() -> None:
    """Print the table of the file named on the command line."""
    rows = [("figure", "median", "reference, result", "limit", True), *figures(sys.argv[1])]
    widths = [max(len(str(row[i])) for row in rows) for i in range(4)]
    for number, row in enumerate(rows):
        mark = "" if number == 0 else "ok" if row[4] else "MISSED"
        print("| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=False)), "|", mark)
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    print(f"\n{machine}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
