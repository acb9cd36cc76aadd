"""The lives of one node's store, one after the other in this process."""

from __future__ import annotations

import threading

from inner_parts import parts_of

from kvstore.blocks.codec import encode
from kvstore.config import StoreConfig
from kvstore.node.core import NodeCore
from kvstore.node.handover.giving import hand_over
from kvstore.node.handover.holder import Holder
from kvstore.node.handover.taking import begin, take_old_life
from kvstore.node.handover.transfer import handover_path
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Prepare, decode_ticket

HOST, SETTINGS = "127.0.0.1", {"capacity_bytes": 1 << 17, "call_timeout_s": 2.0, "transfer_timeout_s": 3.0}
NODE = "a"


class Lives:
    """The lives of one node's store."""

    def __init__(self, cluster):
        self.cluster = cluster

    def give(self, wait_s=0.1):
        """Have the present life give its memory to a holder, and end it; the holder waits for the next one."""
        path, core = handover_path("default", NODE), self.cluster.nodes[NODE]
        holder = Holder(path)
        threading.Thread(target=holder.run, args=(20.0,), daemon=True).start()
        try:
            given = hand_over(core, path, wait_s)
        except BaseException:
            holder.close()
            raise
        finally:
            self.cluster.stop_node(NODE)
        return given

    def take(self, **settings):
        """Begin the next life; return how it began."""
        config = StoreConfig(**(SETTINGS | settings))
        old, why_cold = take_old_life(handover_path("default", NODE), config, NODE)

        def make(old):
            resolve = self.cluster.resolve
            return NodeCore(NODE, config, HOST, resolve, lambda: self.cluster.directory.address(), old=old)

        core, beginning = begin(make, old, why_cold)
        self.cluster.nodes[NODE] = core
        self.cluster.start_mover(NODE)
        if core.state.pool_service.is_attached:
            core.pool.check_integrity()
        return beginning

    def go_on(self, wait_s=0.1, **settings):
        self.give(wait_s)
        return self.take(**settings)


def prepare(worker, hashes):
    """Have a worker claim slots, and not write them yet."""
    request = encode(Prepare(parts_of(worker.client).chain(hashes), 1))
    return decode_ticket(parts_of(worker.client).store.calls.call(Op.PREPARE_STORE, request, timeout_s=5))
