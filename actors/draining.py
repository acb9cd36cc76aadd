"""Take one node's store out of service: another takes its chains, then its leases and writes end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvstore.actors.calls import call
from kvstore.errors import KVStoreError, StoreNotRunning

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_TOOK_NONE = "no client with a namespace of these blocks has attached there, or it could not fetch them in time"


def drain_node(node_id: str, stores: Mapping[str, Any], timeout_s: float, hand_over_bytes: int) -> dict[str, Any]:
    """Drain a node's store, as `Store.drain` says.

    Args:
        node_id: of the node.
        stores: handle of each node's store by node id.
        timeout_s: limit for the hand-over and for leases and writes to end.
        hand_over_bytes: most bytes of blocks that another node takes over.
    """
    deadline_s = time.monotonic() + timeout_s
    if node_id not in stores:
        raise StoreNotRunning(f"node {node_id!r} has no store; nodes: {sorted(stores)}")
    chains = call("drain", stores[node_id].begin_drain, hand_over_bytes, timeout_s=_CALL_S)
    # Before they can be evicted here: a node that takes them over counts them for the same tenants.
    tenants = call("drain", stores[node_id].tenants_of, chains, timeout_s=_CALL_S) if chains else []
    handed_over, why_none = 0, dict[str, str]()
    for node, other in stores.items() if chains else ():
        if node == node_id:
            continue
        share_s = max(0.1, (deadline_s - time.monotonic()) / 2)
        try:
            handed_over = int(call("drain", other.adopt, chains, share_s, tenants, timeout_s=share_s + 5))
            why_none[node] = _TOOK_NONE
        except KVStoreError as error:  # Drained as well, or just ending: another one may take them.
            logger.info("node %s takes no chains of node %s: %s", node, node_id, error)
            why_none[node] = str(error)
        if handed_over:
            break
    left_s = max(0.0, deadline_s - time.monotonic())
    left = call("drain", stores[node_id].drain, left_s, timeout_s=left_s + _CALL_S)
    logger.info("drained node %s: %d chains offered, %d blocks moved", node_id, len(chains), handed_over)
    return {"num_handed_over": handed_over, "why_none": "" if handed_over else _why_none(chains, why_none), **left}


def _why_none(chains: list[bytes], by_node: Mapping[str, str]) -> str:
    if not chains:
        return "the node has no blocks to hand over, or hand_over_bytes has no room for one"
    return "; ".join(f"node {node}: {why}" for node, why in by_node.items()) or "no other node has a store"
