"""The scheduler's side of the connector: it finds stored outputs by key, and claims those that its engine will make.

What it holds belongs to one step: it is taken when vLLM asks about a request, and released if the step is built without
it, or when the output of that step has come. So allocations and frees of vLLM need not pair, a request that ends
somewhere leaves nothing, and one that waits lets nobody wait. All of it falls with the process.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from vllm.v1.request import RequestStatus

from shmstore.integrations.encoder.attaching import WRONG, attach, stored_tensor
from shmstore.integrations.vllm.encoder.messages import Report, Step
from shmstore.integrations.vllm.encoder.scope import Scope
from shmstore.integrations.vllm.encoder.settings import Settings
from shmstore.integrations.vllm.names import may_share
from shmstore.store.claims import Claim
from shmstore.store.leases import PinnedRef

_UNDER_WAY = 64
"""More steps than an engine has under way: at most two for each stage of its pipeline."""

_log = logging.getLogger("vllm.shmstore")


class SchedulerSide:
    """What one engine's scheduler knows of the store. vLLM calls it from one thread."""

    def __init__(
        self,
        settings: Settings,
        scope: Scope,
        fields_for: Callable[[str], Container[str]],
        *,
        dtype: torch.dtype,
        widths: Mapping[str, int],
        stores: bool,
    ) -> None:
        """Attach. `fields_for` says what of an item of a modality is about it, and not its content.

        `dtype` is that of outputs, and `widths` has their columns for each modality that vLLM has measured.
        """
        self._settings = settings
        self._claims = settings.single_flight and stores
        self._fields_for = fields_for
        self._dtype = dtype
        self._widths = widths
        self._scope = scope
        self._resets = scope.resets
        scope.follows_files = settings.weights == "files"
        self._reader = attach(settings)
        self._keys: dict[str, tuple[str, Any]] = {}  # and features of the request that was asked about last
        self._held: dict[str, PinnedRef | Claim] = {}  # taken for the next step, by key
        self._allocated: list[tuple[str, int, Any]] = []  # in the next step: request, index and item
        self._loads: dict[str, PinnedRef] = {}  # allocated, and not yet sent to the workers, by identifier
        self._under_way: deque[list[PinnedRef | Claim]] = deque(maxlen=_UNDER_WAY)  # what each step holds
        self._local: set[str] = set()  # identifiers in vLLM's own encoder cache
        self._since: dict[str, float] = {}  # when a request first waited
        self._lost: set[str] = set()  # requests that cannot be served
        self._wrong: set[str] = set()  # keys under which this step has found something else than an output
        self._warned = self._warned_of_steps = False
        self._figures: Counter[str] = Counter()

    # ---- what vLLM asks of a request

    def ensure(self, request: Any, computed: int) -> bool:
        """Hold or claim what the request will need; False if another engine is making it, so that it waits.

        vLLM asks in each step about each running request that has items.
        """
        last, running = request.mm_features[-1].mm_position, request.status == RequestStatus.RUNNING
        if running and last.offset + last.length <= computed:
            return True
        if self._resets != self._scope.resets:
            self._resets = self._scope.resets
            self._local.clear()
            if self._scope.renew():
                self._figures["apart"] = 1
        self._keys = {}
        for feature in request.mm_features:
            key, place = self._key(feature), feature.mm_position
            if place.offset + place.length <= computed:
                self._touch(key)
            elif not (self._obtain if self._has_content(feature) else self._fetch)(request, feature, key):
                return False
            else:
                self._keys.setdefault(feature.identifier, (key, feature))
        return True

    def _obtain(self, request: Any, feature: Any, key: str) -> bool:
        """Hold or claim an item that this engine can encode; False if the request waits."""
        if feature.identifier in self._local:
            self._touch(key)
        elif key and key not in self._held:
            held = self._take(key)
            if isinstance(held, Claim) or (held is not None and self._is_output(held, key, feature)):
                self._held[key] = held
            elif held is None and self._claims and self._waits(request.request_id):
                return False
        return True

    def _fetch(self, request: Any, feature: Any, key: str) -> bool:
        """Hold an item whose client relies on the store, and has sent nothing to encode; False if it waits or fails."""
        if key and (self._find(key, feature) is not None or self._keys.get(feature.identifier, ("",))[0] == key):
            return True  # found, or encoded just before
        if not (key and self._reader.claimed(key, namespace=self._scope.name) and self._waits(request.request_id)):
            self._lost.add(request.request_id)
            if key in self._wrong:
                self._figures["wrong"] += 1
        return False

    def _key(self, feature: Any) -> str:
        """Return the key of an item; an empty one if its output is not shared.

        The number of embeddings is a part: under a name that a client has given, another picture may come, and vLLM
        ends if an output does not fill its place.
        """
        identifier = feature.identifier
        if feature.modality == "prompt_embeds" or not may_share(identifier, self._settings.share_uuids):
            return ""
        return f"{identifier}/{feature.mm_position.get_num_embeds()}"

    def _has_content(self, feature: Any) -> bool:
        about = self._fields_for(feature.modality)
        return any(field.data is not None for name, field in (feature.data or {}).items() if name not in about)

    def _touch(self, key: str) -> None:
        """Count a use that vLLM's own caches hide from the store."""
        if key:
            self._reader.find(key, namespace=self._scope.name)  # garbage is released

    def _find(self, key: str, feature: Any) -> PinnedRef | None:
        """Hold a stored output until the step is built; None if there is none."""
        held = self._held.get(key)
        if not isinstance(held, PinnedRef):
            held = self._reader.find(key, namespace=self._scope.name)
            if held is None or not self._is_output(held, key, feature):
                return None
            self._held[key] = held
        return held

    def _is_output(self, found: PinnedRef, key: str, feature: Any) -> bool:
        """Return whether what somebody has stored is an output for this item: else loading it would end the engine."""
        value, rows = stored_tensor(self._reader, found.ref), feature.mm_position.get_num_embeds()
        width = self._widths.get(feature.modality)
        if (
            value is not None
            and value.dtype == self._dtype
            and value.ndim == 2
            and len(value) == rows
            and width in (None, value.shape[1])
        ):
            return True
        self._wrong.add(key)
        if not self._warned:
            self._warned = True
            expected = f"{rows} x {width or 'any width'} {self._dtype}"
            _log.warning(WRONG, self._settings.store, key, self._scope.name, expected)
        return False

    def _take(self, key: str) -> PinnedRef | Claim | None:
        look = self._reader.find_or_claim if self._claims else self._reader.find
        return look(key, namespace=self._scope.name)

    def _waits(self, request_id: str) -> bool:
        """Return whether the request waits for another engine: not longer than the limit."""
        now = time.monotonic()
        if request_id not in self._since:
            self._since[request_id] = now
            self._figures["deferred"] += 1
        return now - self._since[request_id] < self._settings.wait_s

    def has(self, identifier: str) -> bool:
        """Return whether the output is stored; it is held from now on, since a load that fails ends the engine.

        The item is one of the request that `ensure` was asked about last.
        """
        key, feature = self._keys.get(identifier, ("", None))
        return key != "" and self._find(key, feature) is not None

    def allocate(self, request: Any, index: int) -> None:
        """Note that vLLM keeps a place for the item, which this step loads or encodes, unless it is preempted."""
        self._allocated.append((request.request_id, index, request.mm_features[index]))

    def finish(self, request: Any) -> None:
        """Forget a request, however it ended."""
        self._since.pop(request.request_id, None)
        self._lost.discard(request.request_id)

    def lost(self) -> set[str]:
        """Return the requests that must fail, and release what the oldest step held; vLLM asks when it has ended.

        The workers have loaded what it needed, and stored what they made, or are about to.
        """
        if self._under_way:
            self._under_way.popleft()
        else:
            self._warn_of_steps("more")
        lost, self._lost = self._lost, set()
        return lost

    # ---- a step

    def build(self, output: Any) -> Step:
        """Return what the workers do in this step, and release what it does not need."""
        step = Step(self._scope.name)
        under_way: list[PinnedRef | Claim] = []
        for request_id, index, feature in self._allocated:
            self._local.add(feature.identifier)
            key = self._key(feature)
            held = self._held.get(key)
            if isinstance(held, PinnedRef):
                self._loads[feature.identifier] = held
                del self._held[key]
                self._figures["hits"] += 1
            elif index in output.scheduled_encoder_inputs.get(request_id, ()):
                self._figures["encoded"] += 1
                if key:
                    step.saves[feature.identifier] = key
                if held is not None:
                    under_way.append(held)
                    del self._held[key]
                elif key in self._wrong:
                    self._figures["wrong"] += 1
                elif key and self._claims:
                    self._figures["unclaimed"] += 1
        for identifier in output.free_encoder_mm_hashes:
            self._local.discard(identifier)
            self._loads.pop(identifier, None)
        self._held.clear()
        self._allocated.clear()
        self._wrong.clear()
        if output.total_num_scheduled_tokens:
            step.loads = {identifier: pin.ref for identifier, pin in self._loads.items()}
            under_way += self._loads.values()
            self._loads = {}
        if len(self._under_way) == _UNDER_WAY:  # the oldest is released
            self._warn_of_steps("fewer")
        self._under_way.append(under_way)
        return step

    def _warn_of_steps(self, outputs: str) -> None:
        if not self._warned_of_steps:
            self._warned_of_steps = True
            _log.warning(
                "vLLM has reported %s outputs than steps, which shmstore does not expect: pins and claims of a step "
                "may end too early or too late",
                outputs,
            )

    def count(self, report: Report) -> None:
        """Add what the first worker has counted. If it only reads, nobody waits for what this engine makes."""
        self._figures += report.figures
        self._claims = self._claims and not report.figures["unstored"]

    def figures(self) -> Counter[str]:
        """Return what was counted since the last call."""
        figures, self._figures = self._figures, Counter()
        return figures

    def close(self) -> None:
        """Release everything."""
        for kept in (self._held, self._loads, self._under_way):
            kept.clear()
        self._reader.close()
