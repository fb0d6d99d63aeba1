"""What the plug-in, the managers and the connector rely on in vLLM, in the versions that they were tested with.

    python -m shmstore.integrations.vllm.compare

prints it as a table, and what differs in the vLLM of this environment. The plug-in asks the same before it changes
anything, and so do our managers and the connector.
"""

import sys
from collections.abc import Iterable

from shmstore.integrations import compare
from shmstore.integrations.compare import Has, Uses

__all__ = ["PARTS", "TESTED", "difference"]

TESTED = ">=0.32,<0.34"
_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_OUTPUTS, _CLIENT = "v1.engine.output_processor:OutputProcessor", "v1.engine.core_client"
_PROCESSOR_CALLS = "output_processor.add_request output_processor.abort_requests output_processor.process_outputs"
_WORKER_CALLS = """ec_connector.bind_connector_metadata ec_connector.start_load_caches ec_connector.is_consumer
    ec_connector.build_connector_worker_meta ec_connector.clear_connector_metadata"""

CACHES = (
    Has(
        "multimodal.cache.base:BaseMultiModalProcessorCache",
        """cache_if_fits clear_cache() close() get_and_update get_and_update_item(mm_item mm_hash) invalidate(mm_hash)
        is_cached(mm_hashes) is_cached_item(mm_hash) make_stats(delta) release_sender_touches()
        touch_sender_cache_item(mm_hash) validate_input_item(mm_item mm_hash)""",
        only=True,
    ),
    Has(
        "multimodal.cache.base:BaseMultiModalReceiverCache",
        """cache_if_fits clear_cache() get_and_update get_and_update_features(mm_features)
        get_and_update_item(mm_item mm_hash) touch_receiver_cache_item(mm_hash mm_item)""",
        only=True,
    ),
    Has("multimodal.cache.shm:ShmObjectStoreSenderCache", "__init__(vllm_config)"),
    Has("multimodal.cache.shm:ShmObjectStoreReceiverCache", "__init__(vllm_config shared_worker_lock)"),
    Uses("multimodal.cache.factories:processor_cache_from_config", "_get_cache_type ShmObjectStoreSenderCache"),
    Uses("multimodal.cache.factories:worker_receiver_cache_from_config", "_get_cache_type ShmObjectStoreReceiverCache"),
    Uses(
        "multimodal.processing.processor:BaseMultiModalProcessor",
        "cache.is_cached cache.touch_sender_cache_item cache.get_and_update_item cache.release_sender_touches",
    ),
    Uses("v1.worker.worker_base:WorkerWrapperBase", "mm_cache.get_and_update_features"),
    Has("multimodal.inputs:MultiModalFieldElem", "__init__(data field)"),
    Has("multimodal.inputs:MultiModalFeatureSpec", "data identifier"),
    Has(
        _OUTPUTS,
        """abort_requests(request_ids ...) add_request(request prompt parent_req request_index queue ...)
        process_outputs(engine_core_outputs ...)""",
    ),
    Uses(f"{_OUTPUTS}.add_request", "request_states"),
    Uses(f"{_OUTPUTS}.abort_requests", "request_states.pop"),
    Uses(f"{_OUTPUTS}.process_outputs", "self._finish_request"),
    Uses(f"{_OUTPUTS}._finish_request", "request_states.pop"),
    Uses("v1.engine.async_llm:AsyncLLM", _PROCESSOR_CALLS),
    Uses("v1.engine.llm_engine:LLMEngine", _PROCESSOR_CALLS),
    Has(
        "renderers.base:BaseRenderer",
        "_process_mm_uuids(mm_data mm_data_items mm_uuid_items mm_req_id) _process_multimodal(prompt mm_data ...)",
    ),
    Uses("renderers.base:BaseRenderer", "_mm_processor_cache"),
    Has("multimodal.processing.inputs:ProcessorInputs", "get_mm_hashes(model_id hash_algorithm) mm_uuid_items"),
    Uses("multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes", "inputs.get_mm_hashes"),
    Has(f"{_CLIENT}:AsyncMPClient", "_send_input(request_type request engine ...)"),
    Uses(f"{_CLIENT}:AsyncMPClient.add_request_async", "self._send_input EngineCoreRequestType.ADD"),
    Uses(f"{_CLIENT}:DPAsyncMPClient.add_request_async", "self._send_input EngineCoreRequestType.ADD"),
    Has("v1.engine:EngineCoreOutput", "finish_reason finished new_token_ids pooling_output request_id"),
    Has(
        "config.parallel:ParallelConfig",
        """_api_process_count data_parallel_backend data_parallel_size data_parallel_size_local
        distributed_executor_backend enable_elastic_ep local_engines_only nnodes world_size""",
    ),
)
"""For the caches."""

KV_CACHE = (
    Has(
        "v1.core.kv_cache_manager:KVCacheManager",
        """allocate_slots(request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens
            num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks
            has_scheduled_reqs skip_zeroing_group_ids)
        block_pool cache_blocks(request num_computed_tokens) coordinator empty_kv_cache_blocks
        estimate_cached_tokens(request) evict_blocks(block_ids) finalize_partial_tail_offloads free(request)
        get_block_ids(request_id) get_block_ids_for_computed_tokens get_blocks(request_id)
        get_computed_blocks(request max_cache_hit_length?) get_computed_blocks_for_connector make_prefix_cache_stats()
        mamba_shared_prefix_checkpoint new_step_starts() pop_blocks_for_free(request) record_blocks_for_zeroing
        record_prefix_cache_stats(request num_hits) remove_skipped_blocks reset_prefix_cache()
        take_boundary_state_offloads() take_events() take_kv_cache_block_copies() take_new_block_ids()
        truncate_computed_blocks usage""",
        asked_by=f"{_SCHEDULER}.kv_cache_manager",
    ),
)
"""For the KV-cache manager."""

ENCODER_CACHE = (
    Has(
        "v1.core.encoder_cache_manager:EncoderCacheManager",
        """allocate(request input_id) can_allocate(request input_id encoder_compute_budget num_embeds_to_schedule)
        check_and_update_cache(request input_id) free(request) free_encoder_input(request input_id)
        get_cached_input_ids(request) get_cached_num_encoder_embeds(request input_id) get_freed_mm_hashes()
        get_manager_metadata() reset()""",
        asked_by=f"{_SCHEDULER}.encoder_cache_manager",
    ),
    Has("v1.core.encoder_cache_manager:EncoderCacheManager", "create_manager(cache_size vllm_config)"),
)
"""For the encoder-cache manager."""

ENCODER_CONNECTOR = (
    Has(
        "distributed.ec_transfer.ec_connector.base:ECConnectorBase",
        """build_connector_meta(scheduler_output) ensure_cache_available(request num_computed_tokens)
        get_ec_connector_stats() has_cache_item(identifier) has_pending_push_work() request_finished(request) shutdown()
        take_unavailable_requests() update_connector_output(connector_output) update_state_after_alloc(request index)
        update_state_after_free(request index)""",
        asked_by=f"{_SCHEDULER}.ec_connector",
    ),
    Has(
        "distributed.ec_transfer.ec_connector.base:ECConnectorBase",
        """__init__(vllm_config role) build_ec_connector_stats(data) build_connector_worker_meta()
        build_prom_metrics(vllm_config metric_types labelnames per_engine_labelvalues)
        save_caches(encoder_cache mm_hash kwargs) start_load_caches(encoder_cache kwargs)""",
    ),
    Uses("distributed.ec_transfer.ec_connector.base:ECConnectorBase.bind_connector_metadata", "_connector_metadata"),
    Uses(f"{_SCHEDULER}.schedule", "ec_connector.build_connector_meta"),
    Uses(f"{_SCHEDULER}.update_from_output", "ec_connector.take_unavailable_requests"),
    Uses(
        "v1.worker.ec_connector_model_runner_mixin:ECConnectorModelRunnerMixin",
        f"{_WORKER_CALLS} connector.save_caches",
    ),
    Uses("v1.worker.gpu.ec_connector:ActiveECConnector", f"{_WORKER_CALLS} ec_connector.save_caches"),
)
"""For the connector of encoder outputs."""

PARTS = {
    "caches": CACHES,
    "KV-cache manager": KV_CACHE,
    "encoder-cache manager": ENCODER_CACHE,
    "encoder connector": ENCODER_CONNECTOR,
}


def difference(known: Iterable[Has | Uses]) -> str | None:
    """Return the first difference between the vLLM of this process and what is known of it; None if there is none."""
    return compare.difference("vllm", TESTED, known)


if __name__ == "__main__":
    sys.exit(compare.main("vllm", TESTED, PARTS))
