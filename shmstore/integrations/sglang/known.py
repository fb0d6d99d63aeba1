"""What the plug-in touches of SGLang, as it is in the versions that it knows."""

from shmstore.integrations.compare import Known

_MM_UTILS, _MSGPACK = "srt/managers/mm_utils.py", "srt/utils/msgpack_utils.py"

FEATURES = (
    Known(
        _MM_UTILS,
        "ShmPointerMMData",
        methods="close_and_unlink(self) materialize(self)",
        starts="__init__(self tensor precomputed_hash) __getstate__(self) __setstate__(self state) __del__(self)",
        has="_materialization_error _shm_handle dtype precomputed_hash shape shm_name tensor",
    ),
    Known(_MM_UTILS, "_wrap_shm_or_inline", has="OSError ShmPointerMMData precomputed_hash"),
    Known(_MM_UTILS, "_wrap_tensor_or_list", has="_wrap_shm_or_inline is_cpu"),
    Known(_MM_UTILS, "wrap_shm_features", has="_wrap_tensor_or_list feature hash precomputed_embeddings"),
    Known(_MM_UTILS, "_feature_has_shm", has="ShmPointerMMData isinstance"),
    Known(_MM_UTILS, "_unwrap_tensor_or_list", has="ShmPointerMMData materialize"),
    Known(_MM_UTILS, "_discard_tensor_or_list", has="ShmPointerMMData close_and_unlink"),
    Known(_MSGPACK, "_is_shm_pointer_mm_data", has="__module__ __name__"),
    Known(_MSGPACK, "_encode_shm_pointer_mm_data", has="__getstate__"),
    Known(_MSGPACK, "_decode_shm_pointer_mm_data", has="ShmPointerMMData __new__ __setstate__"),
    Known(
        "srt/managers/scheduler_components/request_receiver.py",
        "SchedulerRequestReceiver",
        has="_finalize_shm_features all_reduce barrier discard_shm_features has_shm_features unwrap_shm_features",
    ),
    Known(
        "srt/managers/tokenizer_manager.py",
        "TokenizerManager",
        starts="_dispatch_to_scheduler(self obj)",
        has="attn_dp_enabled sock_send wrap_shm_features",
    ),
    Known(
        "srt/plugins/hook_registry.py", "HookRegistry", starts="register(cls target hook hook_type) apply_hooks(cls)"
    ),
)
"""For the pointers to tensors, in the versions that docs/guides/sglang.md names."""
