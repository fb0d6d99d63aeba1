"""The plots of the benchmark page, drawn from the tables of that page.

``python -m bench.peers --only-draw`` draws them again without measuring.
"""

import re
from pathlib import Path
from typing import Any

from bench.peers.host import HIT, PUT

SHOWN = {PUT: "A new object: medians by size", HIT: "The same object again: medians by size"}
"""Path: what its plot shows."""
OURS, COPY, MESSAGE = "shmstore", "a plain memcpy", "an empty message"
"""Titles of the rows that look different."""
UNITS = {"µs": 1.0, "ms": 1e3, "s": 1e6}
MARKERS = "os^vD<>pPX*h"
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "navy", "darkgreen", "chocolate")

Medians = dict[str, dict[str, dict[str, float]]]
"""Number of readers ("1 reader"), title of a peer, size ("6 MiB"): microseconds."""


def medians(text: str, path: str) -> Medians:
    """Return the medians of one path, as the tables of the page show them."""
    found: Medians = {}
    for readers, table in re.findall(rf"^## {path}, (\d+ readers?): medians\n\n((?:\|.*\n)+)", text, re.M | re.I):
        head, _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for title, *cells in rows:
            times = {size: re.match(r"([\d.]+) (µs|ms|s)\b", cell) for size, cell in zip(head[1:], cells, strict=True)}
            found.setdefault(readers, {})[title] = {
                size: float(time[1]) * UNITS[time[2]] for size, time in times.items() if time
            }
    return found


def plot_of(page_file: Path, path: str) -> Path:
    """Return the file of the plot of one path."""
    return page_file.with_name(f"{page_file.stem}-{path}.png")


def draw(page_file: Path) -> None:
    """Draw the plots of a page next to it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from PIL import Image

    text = page_file.read_text(encoding="utf-8")
    for path in SHOWN:
        panels = medians(text, path)
        figure, all_axes = pyplot.subplots(
            1, len(panels), figsize=(3 + 5 * len(panels), 5), dpi=80, sharey=True, squeeze=False, layout="constrained"
        )
        for axes, (readers, rows) in zip(all_axes[0], panels.items(), strict=True):
            for number, (title, times) in enumerate(rows.items()):
                if title == COPY and path == HIT:
                    continue  # nothing is copied on a hit
                axes.plot(list(times), list(times.values()), label=title, **_style(title, number))
            axes.set(yscale="log", xlabel="bytes of the tree", title=readers)
            axes.grid(alpha=0.3)
        all_axes[0][0].set_ylabel("µs from put to the last acknowledgement" if path == PUT else "µs of a hit")
        handles, labels = all_axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.canvas.draw()
        image = Image.frombytes("RGBA", figure.canvas.get_width_height(), bytes(figure.canvas.buffer_rgba()))
        image.convert("RGB").quantize(64).save(plot_of(page_file, path), optimize=True)  # a quarter of the bytes
        pyplot.close(figure)


def _style(title: str, number: int) -> dict[str, Any]:
    if title == OURS:
        return {"color": "black", "marker": "o", "lw": 3, "zorder": 5}
    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "ms": 5}
    if title in (COPY, MESSAGE):
        style |= {"color": "grey", "ls": "--" if title == COPY else ":", "lw": 2}
    return style
