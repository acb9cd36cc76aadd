"""A client's link to the stage of its GPU. Attached on demand, and again after its mover died."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.blocks.codec import encode
from kvstore.client.results import HandoffRoute
from kvstore.engine.registered import RegisteredCache
from kvstore.engine.stage_copier import StageCopier, stage_uuid
from kvstore.errors import ConfigError, CopyStuck, KernelError, KVStoreError, RegistrationFailed
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import AskStage, Soon, WarmUp, decode_lanes, decode_stage

logger = logging.getLogger(__name__)

_MAKE_WITHIN_S = 40.0
_RETRY_S = 1.0
#: A hand-off waits for a stage at most this long, and at most this share of its own time: the rest is for the route
#: through host memory.
_WAIT_S, _WAIT_SHARE = 1.0, 0.5


@dataclass(slots=True, eq=False)
class AttachedStage:
    """A stage that this process has mapped. `copier` moves blocks between it and the engine's cache."""

    slab: int
    generation: int
    copier: StageCopier
    num_users: int = 0
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    """The question for a stage, while the store makes the stage. `answer` stays empty if it made none."""

    uuid: str
    answer: bytes = b""
    done: threading.Event = field(default_factory=threading.Event)


class StageLink:
    """The stage of one client. Without caches it never attaches a stage.

    Args:
        ask: asks the node store: (op, payload, timeout in seconds).
        caches: the engine's.
        num_bytes: wanted size of the stage; the first client of a GPU decides.
        peers: nodes whose lanes are warmed up and measured at once.
    """

    def __init__(
        self,
        ask: Callable[[Op, bytes, float], bytes],
        caches: RegisteredCache | None = None,
        num_bytes: int = 0,
        peers: tuple[str, ...] = (),
    ) -> None:
        self._ask, self._caches, self._num_bytes, self._peers = ask, caches, num_bytes, peers
        # `_attaching` is held while the store is asked, up to a minute; `_lock` for a moment. The first is reentrant,
        # because a signal handler may publish or fetch under it.
        self._attaching, self.lock = threading.RLock(), threading.Lock()
        self._is_attaching = False
        self.attached: AttachedStage | None = None
        self._retry_s = 0.0
        self._asked: _Asked | None = None
        self._closed = False

    def attach(self) -> HandoffRoute:
        """Attach the stage, and warm up and measure the lanes from the peers.

        Returns:
            The route of this client's hand-offs, and why not the other one.
        """
        try:
            stage = self._attach()
        except (ConfigError, RegistrationFailed, KernelError) as error:
            return self._host_route(str(error))
        if stage is None:
            return self._host_route("the registered cache is on no GPU")
        rates: dict[str, float] = {}
        why_not = ""
        for node in self._peers:
            question = encode(WarmUp(stage.slab, stage.generation, node))
            try:
                lanes = decode_lanes(self._ask(Op.HANDOFF_WARM, question, _MAKE_WITHIN_S))
            except KVStoreError as error:
                logger.warning("hand-off: the lane from node %s was not warmed up: %s", node, error)
                continue
            usable = [lane.gb_per_s for lane in lanes if not lane.why_not]
            rates[node] = max(usable, default=0.0)
            why_not = why_not or next((lane.why_not for lane in lanes if lane.why_not and not usable), "")
        if why_not and not any(rates.values()):
            self.lose(stage, for_good=True)
            return self._host_route(why_not, rates)
        return HandoffRoute(route="gpu", gb_per_s=rates)

    def use_caches(self, caches: RegisteredCache) -> None:
        """Copy to and from other tensors from now on, if a stage is wanted. Running jobs keep theirs."""
        with self.lock:
            if self._caches is None:
                return
            self._caches = caches
        if (stage := self.attached) is not None:
            self.lose(stage)

    @property
    def is_wanted(self) -> bool:
        """Return whether hand-offs should go through a stage, attached now or not."""
        return self._caches is not None

    @property
    def slab(self) -> int:
        """Return the slab of the attached stage, 0 for none."""
        stage = self.attached
        return stage.slab if stage is not None else 0

    def soon(self, node_id: str, slab: int) -> bytes:
        """Return the message that announces a fetch from a node's stage into the attached one, else nothing."""
        stage = self.attached
        return encode(Soon(node_id, slab, stage.slab, stage.generation)) if stage is not None else b""

    def _host_route(self, why_not: str, rates: dict[str, float] | None = None) -> HandoffRoute:
        logger.warning("hand-offs of this client go through host memory: %s", why_not)
        return HandoffRoute(route="host", why_not=why_not, gb_per_s=rates or {})

    def _attach(self, asked: _Asked | None = None) -> AttachedStage | None:
        with self._attaching:
            if self._is_attaching:
                return None  # In a signal handler of a thread that is attaching: use host memory.
            try:
                self._is_attaching = True
                return self._attach_alone(asked)
            finally:
                self._is_attaching = False

    def _attach_alone(self, asked: _Asked | None) -> AttachedStage | None:
        if (caches := self._caches) is None:
            return None
        uuid = stage_uuid(caches.layout)
        if self.attached is not None or not uuid or self._closed:
            return self.attached
        if asked is not None and asked.uuid != uuid:
            return None  # Tensors on another GPU were registered since: the next job asks again.
        answer = self._ask_stage(uuid, caches) if asked is None else asked.answer
        found = decode_stage(answer)
        stage = AttachedStage(found.slab, found.generation, StageCopier(caches, found))
        with self.lock:
            if not self._closed and self._caches is caches:
                self.attached = stage
                return stage
        stage.copier.close()  # Closed meanwhile, or other tensors were registered: the next job attaches again.
        return None

    def _ask_stage(self, uuid: str, caches: RegisteredCache) -> bytes:
        return self._ask(
            Op.HANDOFF_STAGE, encode(AskStage(uuid, self._num_bytes, caches.shape.block_bytes)), _MAKE_WITHIN_S
        )

    def take(self, within_s: float = math.inf) -> AttachedStage | None:
        """Return the stage, kept mapped until `leave`; None when there is none now.

        A stage that is being attached again is waited for only for a part of the job's time, `within_s`.
        """
        if (stage := self._take_attached()) is not None or self._closed or not self.is_wanted:
            return stage
        wait_s = 0.0
        if (asked := self._asked) is None:
            if self._is_attaching or time.monotonic() <= self._retry_s:
                return None
            # Its mover died: the next one runs after a second or two, and may need long to make its stage.
            self._retry_s = time.monotonic() + _RETRY_S
            if (asked := self._begin_to_ask()) is None:
                return None
            wait_s = min(_WAIT_S, _WAIT_SHARE * within_s)
        # Only the job that asked waits; others that come meanwhile do not.
        if not asked.done.wait(wait_s):
            return None
        self._asked = None
        if asked.answer:
            try:
                self._attach(asked)
            except KVStoreError as error:
                logger.warning("hand-offs of this client go through host memory for now: %s", error)
        return self._take_attached()

    def _begin_to_ask(self) -> _Asked | None:
        """Ask the store for a stage on another thread. Return None without a GPU or a thread.

        That thread only asks. The job that takes the stage maps it, on a thread that knows what its GPU does now.
        """
        caches = self._caches
        if caches is None or not (uuid := stage_uuid(caches.layout)):
            return None
        asked = _Asked(uuid)

        def ask() -> None:
            try:
                asked.answer = self._ask_stage(uuid, caches)
            except KVStoreError as error:
                if not self._closed:
                    logger.warning("hand-offs of this client go through host memory for now: %s", error)
            except Exception:
                logger.exception("a stage could not be asked for")
            finally:
                if not asked.answer and self._asked is asked:
                    self._asked = None  # The next job asks again.
                asked.done.set()

        self._asked = asked
        try:
            threading.Thread(target=ask, name="raykv-stage", daemon=True).start()
        except BaseException as error:
            self._asked = None
            if not isinstance(error, RuntimeError):
                raise
            logger.warning("hand-offs of this client go through host memory for now: %s", error)
            return None
        return asked

    def _take_attached(self) -> AttachedStage | None:
        with self.lock:  # Count the user in the same step: else the stage may be lost and unmapped in between.
            if (stage := self.attached) is not None:
                stage.num_users += 1
            return stage

    @contextlib.contextmanager
    def using(self, within_s: float = math.inf) -> Iterator[AttachedStage | None]:
        """Keep the stage mapped in the body. Yields None when there is none now; see `take`."""
        taken = stage = self.take(within_s)
        try:
            yield stage
        except CopyStuck:
            taken = None  # A copy to or from it may still run: it stays mapped until this process ends.
            raise
        finally:
            if taken is not None:
                self.leave(taken)

    def leave(self, stage: AttachedStage) -> None:
        """End a job's use of the stage. A job with stuck copies never calls this, so the stage stays mapped."""
        with self.lock:
            stage.num_users -= 1
        self._unmap_if_unused(stage)

    def lose(self, stage: AttachedStage, *, for_good: bool = False) -> None:
        """Drop a stage that is of no use any more. The next job attaches again, unless `for_good`."""
        with self.lock:
            stage.is_lost = True
            if self.attached is stage:
                self.attached, self._retry_s = None, float("inf") if for_good else 0.0
        self._unmap_if_unused(stage)

    def close(self) -> None:
        """Unmap the stage, once no job uses it."""
        self._closed = True
        if (stage := self.attached) is not None:
            self.lose(stage)

    def _unmap_if_unused(self, stage: AttachedStage) -> None:
        with self.lock:
            if not stage.is_lost or stage.num_users:
                return
            stage.num_users = -1
        stage.copier.close()
