"""How a process attaches to the store of encoder outputs and looks into it, and what an operator does if it cannot."""

from __future__ import annotations

from contextlib import suppress

import torch

from shmstore.errors import RankInUseError, ShmStoreError, StoreNotFoundError
from shmstore.integrations.encoder.settings import START, Settings
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreReader

WRONG = (
    "store %s holds something other than an encoder output under key %s of namespace %s (expected: %s): it is encoded "
    "again, and further cases are only counted, as wrong; look for another program that writes there"
)
"""The warning about something that is stored under the key of an encoder output, and is none."""


def attach(settings: Settings) -> ObjectStoreReader:
    """Attach as a rank that only finds; the hints of the errors are for who starts engines."""
    try:
        return ObjectStoreReader.attach(
            settings.store, None, finds_only=True, wait=START, dir=settings.dir, allow_uid=settings.allow_uid
        )
    except StoreNotFoundError as error:
        hint = "start an engine that stores first, which makes it (with vLLM: ec_role ec_both or ec_producer)"
        raise StoreNotFoundError(error.message, hint=hint) from None
    except RankInUseError as error:
        hint = (
            f"raise readers in the options, and {made_again(settings)}; if it is a store of inputs "
            "(SHMSTORE_VLLM_STORE, SHMSTORE_SGLANG_STORE), give another name"
        )
        raise RankInUseError(error.message, hint=hint) from None


def made_again(settings: Settings) -> str:
    """Return how a store is made with other sizes, which only its first engine sets."""
    folder = "" if settings.dir is None else f" --dir {settings.dir}"
    return (
        "have the store made again: end all its engines, remove it by "
        f"`shmstore gc {settings.store} --yes --force{folder}`, start them"
    )


def stored_tensor(reader: ObjectStoreReader, ref: ObjectRef) -> torch.Tensor | None:
    """Return a view of what is stored if it is a tensor, else None: any program of this user may have stored it."""
    with suppress(ShmStoreError):  # of bytes that our serializer has not written
        value = reader.get(ref)
        return value if isinstance(value, torch.Tensor) else None
    return None
