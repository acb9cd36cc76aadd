"""The mover as a Ray actor: a child of its node store, so that it dies with it."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import ray

from kvstore.actors.calls import call, ray_failures
from kvstore.actors.finding import constructor_refusal
from kvstore.config import PROTOCOL_VERSION, StoreConfig, set_ucx_lane
from kvstore.errors import PeerLost, RegistrationFailed
from kvstore.memory.arena import attach_arena
from kvstore.mover.gpu_stage import GpuStage
from kvstore.mover.link import MoverLink
from kvstore.mover.process import Mover as MoverLoop
from kvstore.mover.slabs import Slabs
from kvstore.rpc.connect import connect_local, greeting_of
from kvstore.runtime.cores import num_copy_threads

logger = logging.getLogger(__name__)

_GRACE_S = 3.0


class Mover:
    """Maps the arena of one node store, registers it with NIXL and runs its READs.

    Args:
        control_path: the node store's control socket on this node.
        name: NIXL agent name, unique for each mover process.
    """

    def __init__(self, control_path: str, name: str, config_json: str) -> None:
        config = StoreConfig.from_json(config_json)
        # It makes stages on every GPU whose worker asks, by UUID; Ray would hide all GPUs from it.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        set_ucx_lane(config.lane)
        from kvstore.mover.parallel import node_transport

        hello = {"role": "mover", "protocol": PROTOCOL_VERSION}
        client, file = connect_local(control_path, hello, timeout_s=config.call_timeout_s)
        self._arena = attach_arena(file, greeting_of(client).arena_bytes)
        self._arena.populate()
        arena = node_transport(name, self._arena.address, self._arena.num_bytes, config.lane, num_copy_threads())
        self._slabs = Slabs(name, arena, self._arena.address, GpuStage)
        self._loop = MoverLoop(client.detach(), self._slabs, self._slabs)
        self._thread = threading.Thread(target=self._run, name="raykv-mover", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run(self._arena.address)
        except Exception:
            logger.exception("mover: unexpected error; this process ends and is replaced")
        else:
            # The store closed the connection: leave Ray time to end this actor with the store.
            time.sleep(_GRACE_S)
        # The kernel tells the node store of this end, whatever its reason; the store starts another mover.
        os._exit(0)

    def pid(self) -> int:
        """Return the process id; an answer also shows that the mover has started."""
        return os.getpid()


class MoverActor:
    """A mover's actor, used by `MoverKeeper`."""

    def __init__(self, handle: Any, link: MoverLink) -> None:
        self._handle, self._link = handle, link

    def wait_started(self, timeout_s: float) -> None:
        """Wait until its constructor has returned."""
        try:
            call("mover", self._handle.pid, timeout_s=timeout_s)
        except PeerLost as error:
            self._link.problem = constructor_refusal(error, RegistrationFailed)
            raise

    def kill(self) -> None:
        """End its process."""
        with ray_failures("mover"):
            ray.kill(self._handle)
