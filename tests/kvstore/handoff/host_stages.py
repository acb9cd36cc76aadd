"""Stages in host memory: whose memory it is makes no difference to the bookkeeping."""

import ctypes
import secrets
import threading

import numpy as np
from inner_parts import parts_of

from kvstore.engine.host_copier import HostCopier
from tests.kvstore.handed_off import Held, is_empty
from tests.kvstore.loopback import LoopbackTransport

BLOCK = 1024


class HostStage:
    """A stage in this process's memory; `handle` names it in `memories`."""

    memories: dict[str, np.ndarray] = {}  # noqa: RUF012 - of this test alone.

    def __init__(self, name, uuid, num_bytes, network):
        if uuid == "00":
            raise RuntimeError("this process sees no such GPU")
        self.gpu, self.handle = int(uuid, 16), secrets.token_bytes(16)
        self.memory = self.memories[self.handle] = np.zeros(num_bytes, np.uint8)
        self.address = self.memory.ctypes.data
        self.transport = LoopbackTransport(name, self.memory, network)
        self.num_copied, self.may_copy = 0, threading.Event()
        self.may_copy.set()

    def copy_out(self, target, offset, num_bytes):
        assert self.may_copy.wait(10)
        ctypes.memmove(target, self.address + offset, num_bytes)

    def begin_copies(self, runs, source):
        for target, source, num_bytes in runs:
            ctypes.memmove(target, source, num_bytes)
            self.num_copied += num_bytes
        return len(runs)

    def copies_done(self, mark):
        return True

    def close(self):
        self.transport.close()


class HostSide(HostCopier):
    """A `StageCopier` in this process's memory."""

    num_expected = 0
    #: Set when the blocks are computed, of a test that publishes them before.
    computed = None

    def expect(self, pages, ends, *, to_slots):
        self.num_expected += ends[-1]

    def begin_into_slots(self, pages, indexes, slots):
        self.into_slots(pages, indexes, slots)

    def await_begun(self, pages):
        return self.computed is not None and self.computed.wait(10)


class Order:
    """A `CopyOrder` that says what it was asked for."""

    def __init__(self):
        self.asked = []

    def end(self):
        self.asked.append("end")

    def wait_on(self, stream, timeout_s):
        return True

    def hold_engine(self):
        self.asked.append("hold")

    def settle(self, timeout_s):
        self.asked.append("settle")
        return True


class StageArena:
    """What a HostCopier wants of an arena."""

    def __init__(self, memory):
        self.memory = memory

    def bytes_view(self):
        return self.memory


class HeldBlocks(Held):
    """Holds READs of blocks, and not those of the one slot that wake a lane."""

    def post(self, request):
        handle = super().post(request)
        if len(request.local_slots) == 1:
            self._begun[handle] = self._transport.post(self.waiting.pop(handle))
        return handle

    def poll(self, handle):
        return self._transport.poll(self._begun[handle]) if handle in self._begun else super().poll(handle)


def held_packing(client):
    """Hold the end of what a client packs, or all of it where that goes to the arena, until the event is set."""
    link, go = parts_of(client).stage, threading.Event()
    copier, name = (parts_of(client).copier, "into_slots") if not link.is_wanted else (link.attached.copier, "finish")
    pack = getattr(copier, name)
    setattr(copier, name, lambda *args: (go.wait(10), pack(*args)))
    return go


def nothing_held(cluster, wait_until):
    def check():
        for core in cluster.nodes.values():
            for stage in core.control.handoffs.stages.all():
                stage.pool.check_integrity()
                if stage.pool.stats().num_free != stage.pool.num_slots:
                    return False
        return all(is_empty(core) for core in cluster.nodes.values() if core.state.pool_service.is_attached)

    wait_until(check)
