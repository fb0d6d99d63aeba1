"""The namespace of an engine's encoder outputs: whatever changes them, and is not in an item's hash.

vLLM's hash has the item, the model's name, and the request's own processor and media options. Tensor parallelism is not
here: outputs are whole on each rank, and sharing them between engines of other sizes is worth it.
"""

from __future__ import annotations

import copy
import logging
import secrets
from typing import Any

from shmstore.integrations.encoder.namespace import namespace_of
from shmstore.integrations.vllm.names import processing

_log = logging.getLogger("vllm.shmstore")


class Scope:
    """The namespace of one engine, which its connector and its encoder-cache manager share."""

    def __init__(self, vllm_config: Any) -> None:
        self._engine = vllm_config  # which keeps the key of `_scopes` its own
        self._config = copy.deepcopy(vllm_config)  # since a model may change it while it is built
        self._own = False
        self.resets = 0
        """How often vLLM has reset the encoder cache, which it does before the weights change in place."""
        self.follows_files = False
        """Whether the weights are those of the model's files after a reset, too: the option `weights`."""
        self.name = self._first = _digested(self._config)

    def reset(self) -> None:
        """Note that the weights may change: begin a namespace of this engine alone, unless they follow the files."""
        self.resets += 1
        if not self.follows_files:
            self.name = f"{self._first} {secrets.token_hex(8)}"
            if not self._own:
                self._own = True
                _log.warning(
                    "the encoder cache was reset, so the weights may change, and until its restart this engine shares "
                    "encoder outputs with no other (hint: if it only ever loads the model's files, set weights to "
                    '"files" in ec_connector_extra_config)'
                )

    def renew(self) -> bool:
        """Take the files as they are after a reset; return whether the namespace is this engine's alone."""
        if self.follows_files:
            self.name = _digested(self._config)
        return self._own


_scopes: dict[int, Scope] = {}
"""By the id of the engine's configuration: its `instance_id` changes when vLLM has sized the KV cache."""


def of(vllm_config: Any) -> Scope:
    """Return the scope of an engine, which is that of its configuration at the first call."""
    if id(vllm_config) not in _scopes:
        _scopes[id(vllm_config)] = Scope(vllm_config)
    return _scopes[id(vllm_config)]


def reset(vllm_config: Any) -> None:
    """Tell the engine's connector, if it has ours, that the weights may change."""
    if (scope := _scopes.get(id(vllm_config))) is not None:
        scope.reset()


def _digested(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    media = model.multimodal_config
    about = {
        "items": processing(vllm_config),
        "weights": model.model_weights,
        "quantization": [model.quantization, repr(model.quantization_config)],
        "load": [str(load.load_format), repr(load.model_loader_extra_config)],
        "device": vllm_config.device_config.device_type,
        "encoder": media.compute_hash(),
    }
    return namespace_of(str(model.model), model.dtype, about)
