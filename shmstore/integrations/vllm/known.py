"""What the plug-in and the scheduler touch of vLLM, as it is in 0.32 and 0.33.

`compare` reads vLLM's sources and says what differs. A parameter that one of them lacks has a "?".
"""

from shmstore.integrations.compare import Known

_MANAGERS = "v1/core/kv_cache_manager.py", "v1/core/kv_cache_coordinator.py", "v1/core/encoder_cache_manager.py"
_FACTORIES = "multimodal/cache/factories.py"

CACHES = (
    Known(
        "multimodal/cache/base.py",
        "BaseMultiModalProcessorCache",
        """cache_if_fits(self cache key value) clear_cache(self) close(self) get_and_update(self mm_items mm_hashes)
        get_and_update_item(self mm_item mm_hash) invalidate(self mm_hash) is_cached(self mm_hashes)
        is_cached_item(self mm_hash) make_stats(self delta) release_sender_touches(self)
        touch_sender_cache_item(self mm_hash) validate_input_item(self mm_item mm_hash)""",
    ),
    Known(
        "multimodal/cache/base.py",
        "BaseMultiModalReceiverCache",
        """cache_if_fits(self cache key value) clear_cache(self) get_and_update(self mm_items mm_hashes)
        get_and_update_features(self mm_features) get_and_update_item(self mm_item mm_hash)
        touch_receiver_cache_item(self mm_hash mm_item)""",
    ),
    Known("multimodal/cache/shm.py", "ShmObjectStoreSenderCache", starts="__init__(self vllm_config)"),
    Known(
        "multimodal/cache/shm.py", "ShmObjectStoreReceiverCache", starts="__init__(self vllm_config shared_worker_lock)"
    ),
    Known(_FACTORIES, "processor_cache_from_config", has="_get_cache_type ShmObjectStoreSenderCache"),
    Known(_FACTORIES, "worker_receiver_cache_from_config", has="_get_cache_type ShmObjectStoreReceiverCache"),
    Known("multimodal/inputs.py", "MultiModalFieldElem", fields="data field"),
    Known("multimodal/inputs.py", "MultiModalFeatureSpec", has="data identifier"),
    Known(
        "v1/engine/output_processor.py",
        "OutputProcessor",
        starts="""abort_requests(self request_ids) add_request(self request prompt parent_req request_index queue)
        process_outputs(self engine_core_outputs)""",
        has="request_states",
    ),
    Known("v1/engine/core_client.py", "AsyncMPClient", starts="_send_input(self request_type request engine)"),
    Known(
        "v1/engine/__init__.py",
        "EngineCoreOutput",
        has="finish_reason finished new_token_ids pooling_output request_id",
    ),
    Known(
        "config/parallel.py",
        "ParallelConfig",
        has="""_api_process_count data_parallel_backend data_parallel_size data_parallel_size_local
        distributed_executor_backend enable_elastic_ep local_engines_only nnodes world_size""",
    ),
)
"""For the caches."""

KV_CACHE = (
    Known(
        _MANAGERS[0],
        "KVCacheManager",
        """__init__(self kv_cache_config max_model_len scheduler_block_size hash_block_size max_in_flight_tokens
            enable_caching use_eagle num_hash_lookahead_tokens? num_prefill_lookahead log_stats enable_kv_cache_events
            dcp_world_size pcp_world_size metrics_collector watermark enable_mamba_shared_prefix_checkpoint)
        allocate_slots(self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens
            num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks
            has_scheduled_reqs skip_zeroing_group_ids)
        cache_blocks(self request num_computed_tokens) create_kv_cache_blocks(self blocks)
        estimate_cached_tokens(self request) evict_blocks(self block_ids) finalize_partial_tail_offloads(self request)
        free(self request) get_block_ids(self request_id) get_blocks(self request_id)
        get_block_ids_for_computed_tokens(self request_id num_computed_tokens)
        get_computed_blocks(self request max_cache_hit_length?)
        get_computed_blocks_for_connector(self request max_cache_hit_length?)
        get_num_common_prefix_blocks(self running_request_id) make_prefix_cache_stats(self) new_step_starts(self)
        pop_blocks_for_free(self request) prefix_cache_lookup_enabled(self request)
        record_blocks_for_zeroing(self request_id start_token) record_prefix_cache_stats(self request num_hits)
        remove_skipped_blocks(self request_id processed_computed_tokens num_prompt_tokens) reset_prefix_cache(self)
        take_boundary_state_offloads(self) take_events(self) take_kv_cache_block_copies(self) take_new_block_ids(self)
        truncate_computed_blocks(self blocks num_computed_tokens) usage(self)""",
    ),
    Known(
        _MANAGERS[1],
        "KVCacheCoordinator",
        has="eagle_group_ids num_reprefillable_tokens retention_interval single_type_managers",
    ),
    Known(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        reads=(
            "kv_cache_manager",
            """allocate_slots block_pool.free_blocks cache_blocks coordinator.enable_partial_hash_hits
            coordinator.get_num_blocks_to_allocate coordinator.single_type_managers empty_kv_cache_blocks
            empty_kv_cache_blocks.blocks estimate_cached_tokens evict_blocks finalize_partial_tail_offloads free
            get_block_ids get_block_ids_for_computed_tokens get_blocks get_computed_blocks
            get_computed_blocks_for_connector get_num_common_prefix_blocks make_prefix_cache_stats
            mamba_shared_prefix_checkpoint new_step_starts pop_blocks_for_free record_blocks_for_zeroing
            record_prefix_cache_stats remove_skipped_blocks reset_prefix_cache take_boundary_state_offloads
            take_events take_kv_cache_block_copies take_new_block_ids truncate_computed_blocks usage""",
        ),
    ),
)
"""For the KV-cache manager."""

ENCODER_CACHE = (
    Known(
        _MANAGERS[2],
        "EncoderCacheManager",
        """__init__(self cache_size) allocate(self request input_id) create_manager(cls cache_size vllm_config)
        can_allocate(self request input_id encoder_compute_budget num_embeds_to_schedule)
        check_and_update_cache(self request input_id) free(self request) free_encoder_input(self request input_id)
        get_cached_input_ids(self request) get_cached_num_encoder_embeds(self request input_id)
        get_freed_mm_hashes(self) get_manager_metadata(self) reset(self)""",
    ),
    Known(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        reads=(
            "encoder_cache_manager",
            """allocate can_allocate check_and_update_cache free free_encoder_input get_cached_input_ids
            get_cached_num_encoder_embeds get_freed_mm_hashes get_manager_metadata reset""",
        ),
    ),
)
"""For the encoder-cache manager."""

ENCODER_CONNECTOR = (
    Known(
        "distributed/ec_transfer/ec_connector/base.py",
        "ECConnectorBase",
        """__init__(self vllm_config role) bind_connector_metadata(self connector_metadata)
        build_connector_meta(self scheduler_output) build_connector_worker_meta(self)
        build_ec_connector_stats(cls data)
        build_prom_metrics(cls vllm_config metric_types labelnames per_engine_labelvalues)
        clear_connector_metadata(self) ensure_cache_available(self request num_computed_tokens)
        get_ec_connector_stats(self) get_finished(self finished_req_ids) has_cache_item(self identifier)
        has_pending_push_work(self) is_consumer(self) is_producer(self) register_caches(self ec_caches)
        request_finished(self request) role(self) save_caches(self encoder_cache mm_hash) shutdown(self)
        start_load_caches(self encoder_cache) start_save_caches(self) start_worker_services(self)
        take_unavailable_requests(self) update_connector_output(self connector_output)
        update_state_after_alloc(self request index) update_state_after_free(self request index)""",
    ),
    Known(
        "v1/worker/ec_connector_model_runner_mixin.py",
        "ECConnectorModelRunnerMixin",
        """maybe_get_ec_connector_output(scheduler_output encoder_cache)
        maybe_save_ec_to_connector(encoder_cache mm_hash)""",
    ),
    Known(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        reads=(
            "ec_connector",
            """build_connector_meta ensure_cache_available get_ec_connector_stats has_cache_item has_pending_push_work
            request_finished shutdown take_unavailable_requests update_connector_output update_state_after_alloc
            update_state_after_free""",
        ),
    ),
)
"""For the connector of encoder outputs."""
