"""The connector class; vLLM makes one object for its scheduler, and one for each worker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvstore.errors import ConfigError
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.plan import StepPlan, WorkerHello, WorkerReport
from kvstore.integrations.vllm.scheduler_side.scheduler import SchedulerSide
from kvstore.integrations.vllm.scheduler_side.tracked import hits_by_source
from kvstore.integrations.vllm.space import check_engine, has_names_of_media, part_of
from kvstore.integrations.vllm.stats import RaykvStats, Stats
from kvstore.integrations.vllm.worker_side.worker import WorkerSide

logger = logging.getLogger(__name__)

#: Steps that wait for the workers' findings. The first one brings them; vLLM plans a few steps ahead of its report.
_HELLO_STEPS = 100

P = ParamSpec("P")
T = TypeVar("T")


def _timed(method: Callable[Concatenate[RaykvConnector, P], T]) -> Callable[Concatenate[RaykvConnector, P], T]:
    """Measure how long a call keeps the scheduler."""

    @functools.wraps(method)
    def timed(self: RaykvConnector, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.stats.timed("scheduler", method.__name__):
            return method(self, *args, **kwargs)

    return timed


class RaykvConnector(KVConnectorBase_V1):
    """Saves the KV of prompts to the store, and loads it again.

    Client jobs load and save beside the engine's steps. A request whose blocks are stored waits for its load while
    others compute. scheduler_side/ending.py says what happens to the blocks of a request that ended before its saves.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.parse(transfer.kv_connector_extra_config)
        spec = check_engine(vllm_config, kv_cache_config, options)
        part_of(vllm_config, 0, 0)  # Refuses a number of ranks that does not fit.
        #: Counts and times of this half; `total()` has everything since the start.
        self.stats = Stats()
        self._is_closed = False
        #: Steps that were planned before the scheduler's half was open.
        self.num_steps_before = 0
        self.scheduler_side: SchedulerSide
        self.worker_side: WorkerSide
        if role is KVConnectorRole.SCHEDULER:
            events, drafts = getattr(vllm_config, "kv_events_config", None), vllm_config.speculative_config
            self.scheduler_side = SchedulerSide(
                options,
                int(spec.block_size),
                int(vllm_config.parallel_config.world_size),
                loads=bool(transfer.is_kv_consumer),
                produces=bool(transfer.is_kv_producer),
                emits_events=bool(getattr(events, "enable_kv_cache_events", False)),
                stats=self.stats,
                names_media=has_names_of_media(vllm_config),
                keeps_memory=not any(
                    getattr(vllm_config.model_config, name, False)
                    for name in ("enable_sleep_mode", "enable_cumem_allocator")
                ),
                num_anew=int(drafts is not None and drafts.use_eagle()),
            )
        else:
            from vllm.config import get_current_vllm_config
            from vllm.distributed.parallel_state import get_pp_group, get_tp_group

            _check_siblings(get_current_vllm_config().kv_transfer_config)
            tp_rank, pp_rank = int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)
            part, is_saver = part_of(vllm_config, tp_rank, pp_rank)
            rank = pp_rank * int(vllm_config.parallel_config.tensor_parallel_size) + tp_rank
            self.worker_side = WorkerSide(options, vllm_config, spec, part, rank, is_saver, self.stats)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request must not end before its KV is delivered: no, a cache may lose some."""
        return False

    def shutdown(self) -> None:
        """Wait for running jobs and leave the store; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        side = self.scheduler_side if self.role is KVConnectorRole.SCHEDULER else self.worker_side
        side.close()

    # The scheduler's half.

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take in the workers' findings; beside other connectors these are another's."""
        self._open([hello for hello in metadata.values() if isinstance(hello, WorkerHello)])

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata  # vLLM's name for it with pipeline stages.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's own blocks, to see at a reset whether it could clear them."""
        self.scheduler_side.own_blocks = gpu_block_pool

    @_timed
    def on_new_request(self, request: Any) -> None:
        """Begin to look up a request before vLLM asks for the result."""
        self.scheduler_side.begin(request)

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the store has beyond the engine's; None while that is not known."""
        if self._awaits_hello:
            return None, False
        return self.scheduler_side.match(request, num_computed_tokens)

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load."""
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    @_timed
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return how many of a load's tokens come from which tier; asked after `update_state_after_alloc`."""
        side = self.scheduler_side
        if not side.is_open:
            return {}
        return hits_by_source(side.tracked.get(request.request_id), side.space.shape.block_size, num_external_tokens)

    @_timed
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Return the workers' plan for this step."""
        if self._awaits_hello:
            self.num_steps_before += 1
            if not self._awaits_hello:
                logger.error(
                    "requests go on without the store: wanted each worker's findings in the report of the first step, "
                    "got none in %d; the connector around this one has to pass reports on, as MultiConnector does",
                    self.num_steps_before,
                )
        return self.scheduler_side.plan(scheduler_output)

    @_timed
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' report."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport) and not self.scheduler_side.is_open:
            self._open(report.hellos, is_alone=False)
        received = set(connector_output.finished_recving or ())
        self.scheduler_side.heard(received, report if isinstance(report, WorkerReport) else None)

    @_timed
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether vLLM must keep a request's blocks, and the params for the decode engine."""
        return self.scheduler_side.ended(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should run steps without requests, so that workers report their findings or the saves' end."""
        return self._awaits_hello or any(tracked.is_freed for tracked in self.scheduler_side.ending.requests.values())

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests will be freed soon, so that vLLM need not preempt other requests."""
        return any(not tracked.is_freed for tracked in self.scheduler_side.ending.requests.values())

    def take_events(self) -> Iterable[Any]:
        """Return KV cache events of blocks that came into the store, or left it, since the last call."""
        return self.scheduler_side.events.take()

    def reset_cache(self) -> bool:
        """Make all blocks of this engine's namespace a miss on every node, after weights changed."""
        return self.scheduler_side.reset()

    @property
    def _awaits_hello(self) -> bool:
        """Whether requests wait for the workers' findings: beside other connectors the first report brings them."""
        return not self.scheduler_side.is_open and self.num_steps_before < _HELLO_STEPS

    def _open(self, found: Sequence[WorkerHello], *, is_alone: bool = True) -> None:
        if not found:
            return
        if any(hello.space.digest != found[0].space.digest for hello in found):
            raise ConfigError(
                "RaykvConnector: wanted workers that all hold the same kind of blocks, got different ones: "
                f"{sorted({str(hello.space) for hello in found})}; give every pipeline stage the same number of layers"
            )
        self.scheduler_side.open(found, is_alone=is_alone)

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's tensors."""
        self.worker_side.cache.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerHello | None:
        """Return what the scheduler's half needs to know about the tensors; None before they are registered.

        Also None beside other connectors: vLLM would give it to all of them. The first report brings it then.
        """
        return self.worker_side.hello() if get_kv_transfer_group() is self else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """End the copies of blocks that are about to be overwritten."""
        self.worker_side.settle(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        self.worker_side.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: no request is computed before all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: all layers of a block leave together."""

    def wait_for_save(self) -> None:
        """Start the saves of this step."""
        self.worker_side.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return ended requests whose blocks vLLM may free, and requests whose load is received."""
        self.worker_side.publishing.forget(finished_req_ids)
        sent, received = self.worker_side.poll(self._get_connector_metadata())
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load did not fill."""
        return self.worker_side.take_failed_block_ids()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return this step's report to the scheduler's half; None if it is empty."""
        return self.worker_side.take_report()

    # Both.

    def get_kv_connector_stats(self) -> RaykvStats | None:
        """Return counts and times since the last call."""
        return self.stats.take()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Return what puts the stats among vLLM's own metrics; docs/vllm.md has their names."""
        # Only the process that serves vLLM's metrics needs it.
        from kvstore.integrations.vllm.prometheus import RaykvPromMetrics

        return RaykvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RaykvStats:
        """Rebuild stats from the data that vLLM passed between processes."""
        return RaykvStats(data)


def _check_siblings(transfer: Any) -> None:
    """Refuse two of these connectors in one engine.

    Args:
        transfer: vLLM's KVTransferConfig of the whole engine, also for a connector inside MultiConnector.
    """
    names = [child.get("kv_connector") for child in transfer.get_from_extra_config("connectors", [])]
    if (num_alike := names.count(RaykvConnector.__name__)) > 1:
        raise ConfigError(
            f"kv_connector_extra_config['connectors']: wanted one RaykvConnector, got {num_alike}, which would save "
            "every block several times and load from the first alone; leave one: its store has memory, disk and other "
            "nodes"
        )
