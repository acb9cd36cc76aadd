"""NIXL behind the Transport protocol: the only file that imports NIXL.

Two things differ from NIXL's own Python wrapper, each measured (docs/adr/0004). The progress thread is event-driven:
the wrapper sets its delay to 0, which burns a core per agent. With a long delay it sleeps, still wakes on events, and
transfers get faster and steadier. And one strided row describes a whole slab, and requests are made from index arrays,
so that neighbouring slots merge into one descriptor and nothing is built per block in Python.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np

from kvstore.config import set_ucx_defaults
from kvstore.errors import PeerLost, RegistrationFailed, TransferError, TransferTimeout
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, count_runs
from kvstore.runtime.pauses import give_way

logger = logging.getLogger(__name__)

#: The progress thread wakes on events and at least this often.
PROGRESS_DELAY_US = 100_000

#: Errors of the bindings that mean that the peer is lost; all others are a plain TransferError.
LOST_PEER = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError"})


def load_bindings() -> ModuleType:
    """Import NIXL's bindings, built for the CUDA major version that torch uses here if it is loaded.

    Raises:
        RegistrationFailed: no NIXL wheel is installed, or none loads.
    """
    set_ucx_defaults()
    cuda = str(getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or "12")
    problems = []
    for is_13 in (True, False) if cuda.startswith("13") else (False, True):
        try:
            if is_13:
                import nixl_cu13._bindings as bindings
            else:
                import nixl_cu12._bindings as bindings
            return cast(ModuleType, bindings)
        except ImportError as error:
            problems.append(str(error))
    raise RegistrationFailed(
        f"wanted NIXL, got none ({'; '.join(problems)}); install it with pip install nixl-cu12 (or nixl-cu13)"
    )


def plugin_memory_types() -> dict[str, list[str]]:
    """Return the memory types of each NIXL plugin that loads here; the others map to an empty list."""
    nixl = load_bindings()
    agent = nixl.nixlAgent(f"raykv-probe-{secrets.token_hex(4)}", _agent_config(nixl, PROGRESS_DELAY_US))
    found: dict[str, list[str]] = {}
    for plugin in sorted(agent.getAvailPlugins()):
        try:
            found[plugin] = sorted(str(kind).rsplit(".", 1)[-1] for kind in agent.getPluginParams(plugin)[1])
        except Exception:  # noqa: BLE001 - whatever a plugin that cannot load raises, it does not load.
            found[plugin] = []
    return found


def _agent_config(nixl: ModuleType, progress_delay_us: int | None) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_delay_us is not None
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    config.pthrDelay = progress_delay_us or 0
    config.captureTelemetry = True
    return config


@dataclass(frozen=True, slots=True)
class _Agent:
    """An agent with its UCX backend and the registered slab."""

    handle: Any
    backend: Any
    registration: Any


def _make_agent(
    nixl: ModuleType, name: str, address: int, num_bytes: int, gpu: int | None, progress_delay_us: int | None
) -> _Agent:
    what = "start NIXL's UCX backend (with an NVIDIA GPU here a UCX_TLS that is set has to name cuda_copy too)"
    try:
        handle = nixl.nixlAgent(name, _agent_config(nixl, progress_delay_us))
        backend = handle.createBackend("UCX", {})
        what = f"register {num_bytes} bytes with NIXL over UCX (on InfiniBand memlock must be unlimited)"
        segment = nixl.DRAM_SEG if gpu is None else nixl.VRAM_SEG
        registration = nixl.nixlRegDList(segment, np.array([[address, num_bytes, gpu or 0]], dtype=np.uint64))
        handle.registerMem(registration, [backend])
    except Exception as error:
        chosen = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
        settings = f", with {chosen}" if chosen else ""
        raise RegistrationFailed(f"could not {what}: {error}{settings}; see `kvstore doctor`") from error
    return _Agent(handle, backend, registration)


class NixlTransport:
    """NIXL over UCX with one slab of host or device memory: an agent that peers read from, and one that reads.

    The reading agent has no progress thread: `poll` does its work, on the caller's thread. With one, two threads share
    the copying and its lock, and a READ falls to half its speed when other work needs the other core (docs/adr/0004).

    Args:
        name: unique for each life of the process that owns it: NIXL and peers cache by this name.
        address: first byte of the slab in this process; its owner keeps it mapped until `close`.
        num_bytes: size of the slab.
        gpu: ordinal of the GPU that the slab is on; None is host memory. Its peers' slabs are of the same kind.
        progress_delay_us: of the serving agent; 0 makes its thread spin, as NIXL's wrapper does. Without a thread
            (None) peers cannot read from it.
        separate_reader: False reads through the serving agent, as most users of NIXL do (for comparison).

    Raises:
        RegistrationFailed: the backend could not be made or the slab not be registered.
    """

    def __init__(
        self,
        name: str,
        address: int,
        num_bytes: int,
        *,
        gpu: int | None = None,
        progress_delay_us: int | None = PROGRESS_DELAY_US,
        separate_reader: bool = True,
    ) -> None:
        self.totals = ReadTotals()
        self._nixl = load_bindings()
        self._address, self._gpu = address, gpu
        self.local_lists: dict[int, int] = {}
        self.peers: dict[str, tuple[str, PeerDescription, dict[int, int]]] = {}
        self.handles: dict[int, str] = {}
        #: READs of which NIXL may have started a part before it refused the rest. NIXL cannot stop that part.
        self._lost: set[int] = set()
        self._dead_peers: set[str] = set()
        self._slot_bytes = self._num_slots = 0
        self._server = _make_agent(self._nixl, name, address, num_bytes, gpu, progress_delay_us)
        self._reader = self._server
        if separate_reader:
            self._reader = _make_agent(self._nixl, f"{name}-reader", address, num_bytes, gpu, None)
        self._agent, self._backend = self._reader.handle, self._reader.backend

    def describe(self) -> bytes:
        """Return the serving agent's metadata, taken after registration so that it covers the slab."""
        metadata = self._server.handle.getLocalMD()
        return metadata if isinstance(metadata, bytes) else str(metadata).encode("latin-1")

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Remember how the slab is divided."""
        self._slot_bytes, self._num_slots = slot_bytes, num_slots

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Load a peer's metadata. Not connected yet: the first READ does that and is slower."""
        self.forget_peer(peer)
        try:
            remote = self._agent.loadRemoteMD(description.agent)
            # A name that cannot be decoded is an error of this peer, not of this process.
            name = remote.decode() if isinstance(remote, bytes) else str(remote)
        except Exception as error:
            raise translate_error(error, f"metadata of {peer}") from error
        self.peers[peer] = (name, description, {})

    def forget_peer(self, peer: str) -> None:
        """Release the peer's lists, then invalidate its metadata."""
        known = self.peers.pop(peer, None)
        self._dead_peers.discard(peer)
        if known is None:
            return
        for handle in known[2].values():
            self._agent.releasedDlistH(handle)
        if any(known[0] == name for name, _, _ in self.peers.values()):
            return  # Another peer uses the same agent: it would lose the metadata too.
        try:
            self._agent.invalidateRemoteMD(known[0])
        except Exception as error:
            raise translate_error(error, f"forgetting {peer}") from error

    def post(self, request: ReadRequest) -> int:
        """Make a request from the prepared lists and post it.

        On a same-host lane the copy runs inside this call. A refused request with several descriptors may have been
        started in part, and NIXL drops that part without stopping it: then the READ is LOST.
        """
        known = self.peers.get(request.peer)
        if known is None:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        if request.peer in self._dead_peers:
            raise PeerLost(f"READ from {request.peer}: it disconnected before")  # Before a part can be started.
        name, description, lists = known
        try:
            size = request.block_bytes
            if size not in self.local_lists:
                self.local_lists[size] = self._prepare(
                    self._nixl.NIXL_INIT_AGENT, self._address, size, self._slot_bytes, self._num_slots, self._gpu or 0
                )
            if size not in lists:
                lists[size] = self._prepare(
                    name, description.address, size, description.slot_bytes, description.num_slots, description.gpu
                )
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ, self.local_lists[size], request.local_slots, lists[size],
                request.remote_slots, request.notification, [self._backend], False,
            )  # fmt: skip
        except Exception as error:
            raise translate_error(error, f"READ from {request.peer}") from error
        try:
            self._agent.postXferReq(handle, request.notification)
        except Exception as error:
            failure = self._failure(error, request.peer)
            if self._num_descriptors(request, description) == 1:
                self._agent.releaseXferReq(handle)
                raise failure from error
            logger.warning("%s; a part of it may still write, so this process has to end", failure)
            self._lost.add(handle)
        self.handles[handle] = request.peer
        return int(handle)

    def _num_descriptors(self, request: ReadRequest, description: PeerDescription) -> int:
        """Return the number of descriptors of a request after NIXL merged blocks without gaps on both sides."""
        is_dense = request.block_bytes == self._slot_bytes == description.slot_bytes
        return count_runs(request.local_slots, request.remote_slots) if is_dense else len(request.local_slots)

    def _failure(self, error: Exception, peer: str) -> TransferError:
        failure = translate_error(error, f"READ from {peer}")
        if isinstance(failure, PeerLost):
            self._dead_peers.add(peer)
        return failure

    def _prepare(self, agent: str, address: int, size: int, stride: int, count: int, gpu: int) -> int:
        row = np.array([[address, size, gpu, stride, count]], dtype=np.uint64)
        segment = self._nixl.DRAM_SEG if self._gpu is None else self._nixl.VRAM_SEG
        return int(self._agent.prepXferDlist(agent, segment, row, [self._backend]))

    def poll(self, handle: int) -> ReadState:
        """Ask NIXL; its exceptions are terminal failures."""
        if handle in self._lost:
            return ReadState.LOST
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as error:
            raise self._failure(error, self.handles[handle]) from error
        if status == self._nixl.NIXL_IN_PROG:
            return ReadState.RUNNING
        if status == self._nixl.NIXL_SUCCESS:
            return ReadState.DONE
        raise TransferError(f"READ from {self.handles.get(handle)}: wanted success, got {status}")

    def release(self, handle: int) -> None:
        """Add NIXL's own counts to `totals`, then drop the handle."""
        del self.handles[handle]
        try:
            telemetry = self._agent.getXferTelemetry(handle)
        except Exception:  # noqa: BLE001 - a failed READ has no telemetry, and is not counted.
            telemetry = None
        if telemetry is not None:
            self.totals += ReadTotals(1, int(telemetry.descCount), int(telemetry.totalBytes))
        self._agent.releaseXferReq(handle)

    def notifications(self) -> list[bytes]:
        """Take the notifications of peers."""
        try:
            found = self._server.handle.getNotifs({}, [self._server.backend])
        except Exception as error:
            raise translate_error(error, "notifications") from error
        return [bytes(message) for messages in found.values() for message in messages]

    def read_and_wait(self, request: ReadRequest, timeout_s: float) -> None:
        """Post one READ and wait for it by polling; for benchmarks and probes.

        Raises:
            TransferTimeout: not terminal in time; its destination must not be reused.
            TransferError: it failed.
        """
        handle = self.post(request)
        deadline_s = time.monotonic() + timeout_s
        while self.poll(handle) is not ReadState.DONE:
            if time.monotonic() > deadline_s:
                raise TransferTimeout(f"READ from {request.peer}: not terminal after {timeout_s} s")
            give_way()
        self.release(handle)

    def close(self) -> None:
        """Release handles first: a live one keeps the agent, and so its transfers, alive."""
        for handle in list(self.handles):
            self._agent.releaseXferReq(handle)
        self.handles.clear()
        for peer in list(self.peers):
            self.forget_peer(peer)
        for listed in self.local_lists.values():
            self._agent.releasedDlistH(listed)
        self.local_lists.clear()
        for agent in {id(a): a for a in (self._reader, self._server)}.values():
            agent.handle.deregisterMem(agent.registration, [agent.backend])
        del self._agent, self._reader, self._server


def translate_error(error: Exception, what: str) -> TransferError:
    """Return kvstore's error for an exception of the bindings."""
    name = type(error).__name__
    return (PeerLost if name in LOST_PEER else TransferError)(f"{what}: {name}: {error}")
