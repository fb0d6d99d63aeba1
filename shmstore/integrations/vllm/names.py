"""Which of vLLM's keys may be shared, and in which namespace.

A key that vLLM has made is a hash of the content, the model's name, and the request's own options. It means the same
everywhere if the items are processed in the same way, which `processing` says. A name that a client has chosen says
nothing about the content: clients number their pictures. So it is good for one run of a server, as in vLLM itself. If
the request has options, vLLM hashes the name with them, and the plug-in puts the run before the hash (`hash_by_run`).

The item cache puts its namespace before each key (`Names`). The encoder connector stores only what may be shared.

Without a processor cache and prefix caching vLLM hashes nothing, and numbers the items that have no name: each server
counts from 1. A request with options gets a hash of that number, which looks like one of content. So the plug-in puts
the run before each number (`number_by_run`), and no two servers have one in common.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import transformers
import vllm
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from shmstore.files import PREFIX
from shmstore.integrations.vllm.shared import RUN

_HASH = re.compile("(?:[0-9a-f]{64}){1,2}")
_TEXT = re.compile(f"(?!{PREFIX})[^\ud800-\udfff]+")
"""What has UTF-8, and so can be a key, but a number, which begins with the run."""
numbered_by_run = False
"""Whether `number_by_run` was called in this process, and so in all of its server."""
_LONGEST_HASH = 128
_SETTINGS = {".jinja", ".json", ".model", ".py", ".txt"}
"""The files of a model that a processor and a tokenizer read; weights are none of them."""


def may_share(name: str, share_uuids: bool) -> bool:
    """Return whether two servers that use this name mean the same content: a hash, or with `share_uuids` any text."""
    return (_TEXT if share_uuids else _HASH).fullmatch(name) is not None


class Names:
    """The keys of one server's items in its store, which the next server may take over, and in a tier."""

    def __init__(self, namespace: str, run: str, share_uuids: bool) -> None:
        """Take the namespace of what may be shared, that of the run, and whether names of clients may be shared."""
        self._shared, self._own, self._share_uuids = f"{namespace}/", f"{run}/", share_uuids
        self._usual = lru_cache(4096)(self._key)

    def key(self, name: str) -> str:
        """Return the key under which an item is stored."""
        return self._usual(name) if len(name) <= _LONGEST_HASH else self._key(name)

    def _key(self, name: str) -> str:
        return (self._shared if may_share(name, self._share_uuids) else self._own) + name

    def is_shared(self, key: str) -> bool:
        """Return whether an item may be published to other hosts, and taken from them."""
        return key.startswith(self._shared)


def number_by_run(renderer: type[Any]) -> None:
    """Let vLLM's numbers of items be those of this run; idempotent."""
    global numbered_by_run
    numbered_by_run = True
    theirs: Callable[..., Any] = renderer._process_mm_uuids
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def with_run(self: Any, mm_data: Any, mm_data_items: Any, mm_uuid_items: Any, mm_req_id: str) -> Any:
        return theirs(self, mm_data, mm_data_items, mm_uuid_items, f"{os.environ[RUN]}-{mm_req_id}")

    renderer._process_mm_uuids = with_run


def hash_by_run(inputs: type[Any]) -> None:
    """Let vLLM's hash of a name that a client has chosen be one of this run; idempotent.

    A processor may hash it again, with options of its own. So the run is a part, not only a mark.
    """
    theirs: Callable[..., dict[str, list[str]]] = inputs.get_mm_hashes
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def with_run(self: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        found, names = theirs(self, *args, **kwargs), self.mm_uuid_items or {}
        for modality in found.keys() & names.keys():
            found[modality] = [
                hashed if name in (None, hashed) or _HASH.fullmatch(name) else f"{os.environ[RUN]}-{hashed}"
                for name, hashed in zip(names[modality], found[modality], strict=True)
            ]
        return found

    inputs.get_mm_hashes = with_run


def processing(vllm_config: Any) -> dict[str, Any]:
    """Return all that changes a processed item and its prompt updates, and is not in the item's hash."""
    model = vllm_config.model_config
    media = model.get_multimodal_config()
    return {
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "model": [model.model, model.revision, model.code_revision, str(model.model_impl)],
        "tokenizer": [model.tokenizer, model.tokenizer_revision, str(model.tokenizer_mode)],
        "commits": [_commit(model.model, model.revision), _commit(model.tokenizer, model.tokenizer_revision)],
        "files": [_contents(Path(folder)) for folder in sorted({model.model, model.tokenizer})],
        "config": model.hf_config.to_json_string(use_diff=False),
        "processor": [media.mm_processor_kwargs, media.media_io_kwargs, media.mm_hasher_algorithm],
        "pruning": [media.video_pruning_rate, media.video_pruning_method],
    }


def _commit(repository: str, revision: str | None) -> str | None:
    """Return the commit of what comes from a hub: the name of its folder in the hub's cache.

    Transformers 5 no longer keeps it in the configuration.
    """
    with suppress(HFValidationError):  # a folder
        for file in ("config.json", "tokenizer_config.json"):
            found = try_to_load_from_cache(repository, file, revision=revision)
            if isinstance(found, str):
                return Path(found).parent.name
    return None


def _contents(folder: Path) -> list[tuple[str, str]]:
    """Return name and content's hash of what processors read of a model that is a folder, on whichever host it is."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if os.path.isdir(folder) else []
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files if path.suffix in _SETTINGS]
