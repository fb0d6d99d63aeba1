"""What the plug-in relies on in SGLang, in the versions that it knows.

    python -m shmstore.integrations.sglang.compare

prints it as a table, and what differs in the SGLang of this environment. The plug-in asks the same before it changes
anything.
"""

import sys

from shmstore.integrations import compare
from shmstore.integrations.compare import Has, Uses

__all__ = ["FEATURES", "KNOWN", "difference"]

KNOWN = ">=0.5.22,<0.5.24"
_MM_UTILS, _MSGPACK = "srt.managers.mm_utils", "srt.utils.msgpack_utils"
_TOKENIZER = "srt.managers.tokenizer_manager:TokenizerManager"
_RECEIVER = "srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._finalize_shm_features"

FEATURES = (
    Has(
        f"{_MM_UTILS}:ShmPointerMMData",
        """__del__() __getstate__() __init__(tensor precomputed_hash ...) __setstate__(state) close_and_unlink()
        materialize()""",
        only=True,
    ),
    Uses(
        f"{_MM_UTILS}:ShmPointerMMData",
        "self._materialization_error self._shm_handle self.dtype self.precomputed_hash self.shape self.shm_name tensor",
    ),
    Uses(f"{_MM_UTILS}:_wrap_shm_or_inline", "OSError ShmPointerMMData"),
    Uses(f"{_MM_UTILS}:_wrap_tensor_or_list", "_wrap_shm_or_inline is_cpu"),
    Uses(f"{_MM_UTILS}:wrap_shm_features", "_wrap_tensor_or_list feature hash precomputed_embeddings"),
    Uses(f"{_MM_UTILS}:_feature_has_shm", "ShmPointerMMData isinstance"),
    Uses(f"{_MM_UTILS}:_unwrap_tensor_or_list", "ShmPointerMMData materialize"),
    Uses(f"{_MM_UTILS}:_discard_tensor_or_list", "ShmPointerMMData close_and_unlink"),
    Uses(f"{_MSGPACK}:_is_shm_pointer_mm_data", "__module__ __name__"),
    Uses(f"{_MSGPACK}:_encode_shm_pointer_mm_data", "__getstate__"),
    Uses(f"{_MSGPACK}:_decode_shm_pointer_mm_data", "ShmPointerMMData __new__ __setstate__"),
    Uses(_RECEIVER, "all_reduce barrier discard_shm_features has_shm_features unwrap_shm_features"),
    Uses(f"{_RECEIVER.rpartition('.')[0]}", "self._finalize_shm_features"),
    Has(_TOKENIZER, "_dispatch_to_scheduler(obj)"),
    Uses(_TOKENIZER, "wrap_shm_features self._dispatch_to_scheduler"),
    Uses(f"{_TOKENIZER}._dispatch_to_scheduler", "sock_send"),
    Has("srt.plugins.hook_registry:HookRegistry", "register(target hook hook_type ...) apply_hooks()"),
)
"""For the pointers to tensors."""


def difference() -> str | None:
    """Return the first difference between the SGLang of this process and what is known of it; None if there is none."""
    return compare.difference("sglang", KNOWN, FEATURES)


if __name__ == "__main__":
    sys.exit(compare.main("sglang", KNOWN, {"features": FEATURES}))
