"""What the plug-in relies on in SGLang, in the versions that it knows.

    python -m shmstore.integrations.sglang.compare

prints it as a table, and what differs in the SGLang of this environment. The plug-in asks the same before it changes
anything.
"""

import sys
from collections.abc import Iterable

from shmstore.integrations import compare
from shmstore.integrations.compare import Has, Uses

__all__ = ["ENCODER", "FEATURES", "KNOWN", "PREPROCESS", "UPDATES", "difference"]

KNOWN = ">=0.5.22,<0.5.24"
_MM_UTILS, _MSGPACK = "srt.managers.mm_utils", "srt.utils.msgpack_utils"
_TOKENIZER = "srt.managers.tokenizer_manager:TokenizerManager"
_RECEIVER = "srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._finalize_shm_features"

FEATURES: tuple[Has | Uses, ...] = (
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
    Uses(_TOKENIZER, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE import_processors self.rid_to_state"),
    Uses("srt.managers.multimodal_processor:import_processors", "__path__ import_module"),
    Has(
        "srt.managers.schedule_batch:MultimodalDataItem",
        "feature hash model_specific_data pad_value set_hash(hash_value) set_pad_value()",
    ),
    Has("srt.managers.multi_tokenizer_mixin", "write_data_for_multi_tokenizer(port_args server_args ...)"),
    Has("srt.plugins.hook_registry:HookRegistry", "register(target hook hook_type ...) apply_hooks()"),
)
"""For the pointers to tensors."""


_SCHEDULE, _UPDATER = "srt.managers.mm_schedule", "srt.managers.scheduler_components.weight_updater"
_SCHEDULER = "srt.managers.scheduler:Scheduler"
_SOURCES = ("disk", "distributed", "ipc", "tensor")
UPDATES = ("begin_weight_update", "end_weight_update", *(f"update_weights_from_{source}" for source in _SOURCES))
"""What may change the weights, also if it fails; between begin and end another process may write them."""
ENCODER: tuple[Has | Uses, ...] = (
    Has(
        _SCHEDULE,
        "embedding_cache get_embedding_and_mask(data_embedding_func embedding_items ...) init_mm_embedding_cache(...)",
    ),
    Uses("srt.managers.mm_utils:embed_mm_inputs", "get_embedding_and_mask"),
    Uses(f"{_SCHEDULE}:get_embedding_and_mask", "_get_precomputed_embedding _get_chunked_prefill_embedding"),
    Uses(f"{_SCHEDULE}:_get_chunked_embedding_full", "_flatten_embedding_result _move_items_to_device"),
    Uses(f"{_SCHEDULE}:_batch_encode_per_image_misses", "_move_items_to_device embedding_cache isinstance"),
    Uses(f"{_SCHEDULE}:_can_skip_pre_embed_feature_move", "__class__ getattr"),
    Uses("srt.mem_cache.kv_cache_builder:build_kv_cache", "init_mm_embedding_cache"),
    Has("srt.mem_cache.multimodal_cache:MultiModalStaticCache", "clear() has(mm_hash)"),
    Has("srt.managers.schedule_batch:MultimodalDataItem", "modality offsets"),
    Has(f"{_UPDATER}:SchedulerWeightUpdaterManager", " ".join(f"{update}(recv_req)" for update in UPDATES)),
    Uses(f"{_SCHEDULER}.init_request_dispatcher", " ".join(f"weight_updater.{update}" for update in UPDATES)),
    Has("srt.server_args:ServerArgs", "custom_weight_loader download_dir load_format model_impl model_path revision"),
    Has("srt.runtime_context", "get_parallel() get_server_args() get_serving() process_model_config()"),
    Uses(
        "srt.observability.metrics_collector:SchedulerMetricsCollector.init_new",
        "get_serving parallel.dp_rank served_model_name",
    ),
    Has("srt.utils.common", "find_local_repo_dir(repo_id revision)"),
    Has(_SCHEDULER, "get_new_batch_prefill(running_batch)"),
    Uses(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        """self.waiting_queue req.init_next_round_input running_batch.batch_is_full running_batch.is_empty
        self.chunked_req self.enable_priority_preemption self.is_hybrid_swa""",
    ),
    Uses("srt.managers.schedule_batch:Req", "self.multimodal_inputs"),
)
"""For encoder outputs."""

_CACHE = "srt.multimodal.cache.preprocess_cache:MultimodalPreprocessCache"
_MIXIN = "srt.multimodal.media_artifacts.base:MediaArtifactCacheMixin"
PREPROCESS: tuple[Has | Uses, ...] = (
    Has(
        _MIXIN,
        """_compute_cache_misses(
            misses_to_compute first_index_by_key snapshots previous_metadata resolved_by_key modality
        ) _get_cached_artifact(key content_digest modality allow_featureless) validate_artifact(artifact entry)""",
    ),
    Uses(f"{_MIXIN}.prepare_media_artifacts", "self._compute_cache_misses self._get_cached_artifact wait_for_miss"),
    Uses(f"{_MIXIN}._compute_cache_misses", "cache_value complete_miss fail_miss validate_artifact"),
    Has(_CACHE, "complete_miss(miss value cache_value size_bytes) fail_miss(miss error) pop(key)"),
    Has(
        "srt.multimodal.media_artifacts.base:MediaArtifactInput", "__init__(content_digest artifact_key modality media)"
    ),
    Has("srt.server_args:ServerArgs", "device model_path revision tokenizer_mode trust_remote_code"),
    Has("srt.runtime_context", "get_model() get_parallel() get_server_args() get_serving() process_model_config()"),
    Has("srt.utils.common", "find_local_repo_dir(repo_id revision)"),
    Uses("srt.managers.tokenizer_manager:get_processor_wrapper", "get_model get_serving model_path tokenizer_path"),
)
"""For what tokenizer processes make of images."""


def difference(known: Iterable[Has | Uses] = FEATURES) -> str | None:
    """Return the first difference between the SGLang of this process and what is known of it; None if there is none."""
    return compare.difference("sglang", KNOWN, known)


if __name__ == "__main__":
    sys.exit(
        compare.main(
            "sglang", KNOWN, {"features": FEATURES, "encoder outputs": ENCODER, "preprocessed media": PREPROCESS}
        )
    )
