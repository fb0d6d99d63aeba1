"""The plug-in for SGLang: tensors of images, videos and audio go through one store, instead of one file each.

SGLang calls `register` in each of its processes, through the entry point group ``sglang.srt.plugins``. The tokenizer
process then puts each tensor once into a store, and what travels is a reference. Each rank reads it in place, writable
and private to it. A tensor for which the store has no room goes by SGLang's own file.

    SHMSTORE_SGLANG       1 (default); 0: stay out
    SHMSTORE_SGLANG_GB    size of the store in GiB (4)
    SHMSTORE_SGLANG_STORE a name for the store, which then outlives its server, and the next one takes it over
    SHMSTORE_SGLANG_ENCODER  options of a store of encoder outputs for all engines of the host, in JSON; see `encoder`
    SHMSTORE_SGLANG_PREPROCESS  the same for what tokenizer processes make of images; see `preprocess`

The process at the top compares SGLang's version, and the calls between SGLang and the plug-in, with what is known
(`compare`), and leaves its verdict in the environment, so that all processes which it starts agree. If they differ,
SGLang is as it was, and one line is logged.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmstore.integrations.encoder.settings import Settings

__all__ = ["register"]

_log = logging.getLogger("sglang.shmstore")  # a child of SGLang's own logger, so that its settings apply
logging.getLogger("shmstore").parent = _log

AGREED = "SHMSTORE_SGLANG_AGREED"
"""The variable with the verdict of the process at the top: "in" or "out"."""
GIB = "SHMSTORE_SGLANG_GB"
STORE = "SHMSTORE_SGLANG_STORE"
RUN = "SHMSTORE_SGLANG_RUN"
"""The variable with the name of the store that several tokenizer processes share, if none was chosen."""
ENCODER = "SHMSTORE_SGLANG_ENCODER"
PREPROCESS = "SHMSTORE_SGLANG_PREPROCESS"


def register() -> None:
    """Have SGLang use our pointers, or leave it as it is; idempotent.

    Raises ValueError for settings that mean nothing; SGLang logs that and goes on without the plug-in.
    """
    wanted = os.environ.get("SHMSTORE_SGLANG", "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"SHMSTORE_SGLANG must be 0 or 1, not {wanted!r}")
    if wanted == "0":
        return
    top = AGREED not in os.environ
    if top:
        os.environ[AGREED] = "in" if _decide() else "out"
    if os.environ[AGREED] == "in":
        from shmstore.integrations.sglang import pointer  # it imports SGLang, so only where that is known

        pointer.install()
        if top:
            pointer.install_on_top()
        if settings(ENCODER) is not None:
            from shmstore.integrations.sglang import encoder

            encoder.install()
        if settings(PREPROCESS) is not None:
            from shmstore.integrations.sglang import preprocess

            preprocess.install()


def capacity() -> int:
    """Return the bytes of the store; ValueError if the variable says no size."""
    chosen = os.environ.get(GIB, "4")
    with suppress(ValueError, OverflowError):
        if (size := int(float(chosen) * (1 << 30))) > 0:
            return size
    raise ValueError(f"{GIB} must be a number of GiB above 0, not {chosen!r}")


def settings(variable: str) -> Settings | None:
    """Return the settings of a store for all engines, if there is one; ValueError if the variable says none."""
    if not (chosen := os.environ.get(variable)):
        return None
    from shmstore.integrations.encoder.settings import Settings

    options = None
    with suppress(ValueError):
        options = json.loads(chosen)
    if not isinstance(options, dict):
        raise ValueError(
            f'{variable} must be JSON such as {{"store": "mm-encoder", "capacity_gb": 16}}, not {chosen!r}'
        )
    return Settings.parse(options, variable)


def _decide() -> bool:
    from shmstore.integrations.sglang import compare
    from shmstore.places import folder_of
    from shmstore.store.orphans import remove_dead

    capacity()  # a wrong setting is an error now, and not at the first image
    known = compare.FEATURES
    for variable, more in ((ENCODER, compare.ENCODER), (PREPROCESS, compare.PREPROCESS)):
        known += more if settings(variable) is not None else ()
    if (problem := compare.difference(known)) is not None:
        _log.warning("shmstore stays out, and SGLang uses its own files: %s", problem)
        return False
    remove_dead(folder_of())  # what a server that was killed has left
    return True
