"""Our classes with the hooks that docs/upstream/ proposes to vLLM; stand-ins for vLLM's code have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.multimodal.cache import factories
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import RequestLeases
from shmstore.integrations.vllm.sender import SenderCache
from tests.vllm.encoder.test_scheduler import Host, host  # noqa: F401
from tests.vllm.parts import FIELDS, Desk, config, item, received, same


class Caches:
    """What `mm_processor_cache_cls` names."""

    @classmethod
    def create_sender(cls, *, vllm_config: Any) -> SenderCache:
        return SenderCache(vllm_config)

    @classmethod
    def create_receiver(cls, *, vllm_config: Any, shared_worker_lock: Any) -> ReceiverCache:
        return ReceiverCache(vllm_config, shared_worker_lock)


def test_caches_that_a_setting_names_need_no_change_in_vllms_factories() -> None:
    before = dict(vars(factories))
    about = config()
    settings = about.model_config.get_multimodal_config()
    settings.mm_processor_cache_cls = f"{__name__}.Caches"
    made = resolve_obj_by_qualname(settings.mm_processor_cache_cls)  # as vLLM's factories would
    sender = made.create_sender(vllm_config=about)
    try:
        receiver = made.create_receiver(vllm_config=about, shared_worker_lock=None)
        whole = item(*FIELDS)
        sent, updates = sender.get_and_update_item((whole, ["update"]), "a")
        assert same(whole, received(receiver, sent))
        assert ["update"] == updates
    finally:
        sender.close()
    assert before == vars(factories)


class Server:
    """An API server whose cache has `release(request_id)`."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def take(self, *outputs: Any) -> None:
        """Take what the core answers: also of a request that it has aborted there is a last output."""
        for output in outputs:
            if output.finished:
                self.cache.release(output.request_id)


class Cache(RequestLeases):
    """The cache with the hook."""

    release = RequestLeases.finish


def test_leases_end_when_vllm_releases_a_request_and_need_no_token_of_a_later_one(desk: Desk) -> None:
    server = Server(Cache())
    for name in ("finished", "aborted"):
        server.cache.add(name, [desk.item(name)], part=False)
    outputs = [
        SimpleNamespace(request_id=name, finished=reason is not None, finish_reason=reason)
        for name, reason in (("aborted", None), ("finished", "stop"), ("aborted", "abort"))
    ]
    for output, opened in zip(outputs, (2, 1, 0), strict=True):
        server.take(output)
        assert opened == desk.opened


def test_a_reset_that_the_connector_is_told_of_needs_no_manager_of_ours(host: Host) -> None:  # noqa: F811
    one = host.engine(settings={"enable_prefix_caching": False})
    scheduler, ours = one.scheduler, one.scheduler.encoder_cache_manager
    plain = scheduler.encoder_cache_manager = EncoderCacheManager(ours.cache_size)
    scheduler.ec_connector.reset = ours.reset  # what the connector's own would do
    scheduler.reset_encoder_cache = lambda: (plain.reset(), scheduler.ec_connector.reset())
    before = one.side._scope.name
    for name, encodes in (("a", 1), ("again", 1), ("after", 2)):
        if name == "after":
            scheduler.reset_encoder_cache()
            one.cache.clear()
        one.ask(name, 1)
        one.run()
        assert encodes == one.encodes
    assert before != one.side._scope.name
