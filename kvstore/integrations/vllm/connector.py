"""The class that vLLM makes: one for its scheduler, and one for each worker."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvstore.errors import ConfigError
from kvstore.integrations.vllm.options import Options, SavePolicy
from kvstore.integrations.vllm.plan import StepPlan, WorkerHello, WorkerReport
from kvstore.integrations.vllm.scheduler_side.scheduler import SchedulerSide
from kvstore.integrations.vllm.space import check_block_size, check_engine, has_names_of_media, part_of
from kvstore.integrations.vllm.stats import RaykvStats, Stats
from kvstore.integrations.vllm.worker_side.worker import WorkerSide

P = ParamSpec("P")
T = TypeVar("T")


def _timed(
    method: Callable[Concatenate[RaykvConnector, P], T],
) -> Callable[Concatenate[RaykvConnector, P], T]:
    """Count how long the scheduler was kept."""
    names = ("scheduler", method.__name__)

    def timed(self: RaykvConnector, /, *args: P.args, **kwargs: P.kwargs) -> T:
        begin_s = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.stats.time_each(names, time.perf_counter() - begin_s)

    functools.update_wrapper(timed, method)
    return timed


class RaykvConnector(KVConnectorBase_V1):
    """Keeps the KV of prompts in the store, and brings it back.

    Loads and saves are jobs of the client, beside the engine's steps. A request whose blocks are stored waits for
    its load while others compute; a request that ended keeps its blocks until they are saved.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.parse(transfer.kv_connector_extra_config)
        spec = check_engine(vllm_config, kv_cache_config)
        check_block_size(options.block_size, int(spec.block_size))
        part_of(vllm_config, 0, 0)
        #: Counts and times of this half; `total()` has everything since the begin.
        self.stats = Stats()
        self._is_closed = False
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            events = getattr(vllm_config, "kv_events_config", None)
            self._scheduler = SchedulerSide(
                options,
                int(spec.block_size),
                int(vllm_config.parallel_config.world_size),
                loads=bool(transfer.is_kv_consumer),
                saves=bool(transfer.is_kv_producer) and options.save is not SavePolicy.NONE,
                publishes=bool(transfer.is_kv_producer),
                emits_events=bool(getattr(events, "enable_kv_cache_events", False)),
                stats=self.stats,
                names_media=has_names_of_media(vllm_config),
                keeps_memory=not any(
                    getattr(vllm_config.model_config, name, False)
                    for name in ("enable_sleep_mode", "enable_cumem_allocator")
                ),
            )
        else:
            tp_rank, pp_rank = _ranks()
            part, is_saver = part_of(vllm_config, tp_rank, pp_rank)
            rank = pp_rank * int(vllm_config.parallel_config.tensor_parallel_size) + tp_rank
            self._worker = WorkerSide(options, vllm_config, spec, part, rank, is_saver, self.stats)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request must not end before its KV is somewhere else. A cache may lose some."""
        return False

    def shutdown(self) -> None:
        """Wait for what is under way and leave the store; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # The scheduler's half.

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take what the workers found."""
        found = [hello for hello in metadata.values() if isinstance(hello, WorkerHello)]
        if not found:
            return
        if any(hello.space.digest != found[0].space.digest for hello in found):
            raise ConfigError(
                "RaykvConnector: wanted workers that all hold the same kind of blocks, got different ones: "
                f"{sorted({str(hello.space) for hello in found})}; give every pipeline stage the same number of layers"
            )
        self._side().open(found)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """Take what the workers found; keyed by pipeline and tensor rank."""
        self.set_xfer_handshake_metadata(metadata)

    @_timed
    def on_new_request(self, request: Any) -> None:
        """Have a request looked up before vLLM asks."""
        self._side().begin(request)

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens the store has beyond the engine's; None while that is not known."""
        return self._side().match(request, num_computed_tokens)

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load."""
        self._side().allocated(request, blocks, num_external_tokens)

    @_timed
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Return what the workers have to do in this step."""
        return self._side().plan(scheduler_output)

    @_timed
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers did."""
        report = connector_output.kv_connector_worker_meta
        received = set(connector_output.finished_recving or ())
        self._side().heard(received, report if isinstance(report, WorkerReport) else None)

    @_timed
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a request's blocks have to stay for copies under way, and what the decode engine gets."""
        return self._side().ended(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether steps are wanted although no request is left: to hear that the last saves have ended."""
        return self._side().ending.has_news_to_come

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests come back by themselves, so that none need be taken from others."""
        return self._side().ending.has_pending_frees

    def take_events(self) -> Iterable[Any]:
        """Return KV cache events of what came into the store."""
        return self._side().take_events()

    def reset_cache(self) -> bool:
        """Make everything of this engine's namespace a miss on every node; for when weights changed."""
        return self._side().reset()

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's tensors."""
        self._rank().register(kv_caches)

    def get_handshake_metadata(self) -> WorkerHello | None:
        """Tell the scheduler's half what the tensors showed."""
        return self._rank().hello()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """End the saves of blocks that are about to be overwritten."""
        self._rank().settle(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        self._rank().begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: no request is computed before all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: all layers of a block leave together."""

    def wait_for_save(self) -> None:
        """Start the saves of this step."""
        self._rank().save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves, and those whose loads, are through."""
        self._rank().publishing.forget(finished_req_ids)
        sent, received = self._rank().poll(self._get_connector_metadata())
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load did not fill."""
        return self._rank().take_failed_block_ids()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return what the scheduler's half has to hear of this step."""
        return self._rank().take_report()

    # Both.

    def get_kv_connector_stats(self) -> RaykvStats | None:
        """Return counts and times since the last time."""
        return self.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RaykvStats:
        """Make stats of what vLLM carried between processes."""
        return RaykvStats(data)

    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM called a worker's connector as the scheduler's"
        return self._scheduler

    def _rank(self) -> WorkerSide:
        assert self._worker is not None, "vLLM called the scheduler's connector as a worker's"
        return self._worker


def _ranks() -> tuple[int, int]:
    """Return this worker's tensor- and pipeline-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)
