"""Hand-offs that are under way at one node, as plain values: tickets, fetches of other nodes' tickets, early claims."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from kvstore.handoff.records import Handoff
from kvstore.node.handoff_service import HandoffControl
from kvstore.node.inspection.owners import OwnerPlace, places_of, shown_owner, ticket_name
from kvstore.node.state import NodeState
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock


def handoffs(state: NodeState, control: HandoffControl, server: ControlServer, limit: int) -> dict[str, Any]:
    """Return the tickets of this node, its fetches from others, and the tickets that readers know before they are here.

    Each list is the oldest first, and has `limit` at most.
    """
    places, waiting = places_of(server), control.waiting.num_by_ticket()
    # Copies that are made in one step: the control thread changes the tables meanwhile.
    tickets, fetches = list(control.table.handoffs.values()), control.fetcher.under_way()
    known = {handoff.key for handoff in tickets}
    early = [{"ticket": ticket_name(key), "num_readers": num} for key, num in waiting.items() if key not in known]
    return {
        "tickets": [_ticket(each, state, places, waiting) for each in islice(tickets, limit)],
        "num_tickets": len(tickets),
        "fetches": [
            {
                "owner": shown_owner(each.owner),
                "pid": places.get(each.owner, OwnerPlace()).pid,
                "tenant": places.get(each.owner, OwnerPlace()).tenant,
                "ticket": ticket_name(each.key),
                "from_node": each.node_id,
                "num_blocks": each.num_blocks,
                "num_bytes": each.num_bytes,
                "age_s": round(each.age_s, 3),
                "left_s": round(each.left_s, 3),
                "waits_for": each.waits_for,
            }
            for each in islice(fetches, limit)
        ],
        "num_fetches": len(fetches),
        "early": early[:limit],
        "num_early": len(early),
    }


def _ticket(
    handoff: Handoff, state: NodeState, places: dict[str, OwnerPlace], waiting: dict[bytes, int]
) -> dict[str, Any]:
    now_s, num_blocks, service = clock.now_s(), len(handoff.slots), state.pool_service
    reader = handoff.claim_owner
    if handoff.is_written:
        waits_for, until_s = "its publisher's copies", math.inf
    elif reader:
        waits_for, until_s = f"its reader {shown_owner(reader)}", handoff.claim_deadline_s
    else:
        waits_for, until_s = "a fetch", handoff.deadline_s
    return {
        "ticket": ticket_name(handoff.key),
        "owner": shown_owner(handoff.owner),
        "pid": places.get(handoff.owner, OwnerPlace()).pid,
        "tenant": handoff.place.tenant,
        "namespace": handoff.namespace.hex(),
        "num_blocks": num_blocks,
        "num_bytes": num_blocks * service.block_bytes.get(handoff.namespace, service.slot_bytes),
        "place": "gpu" if handoff.place.slab else "memory",
        "age_s": round(max(0.0, now_s - handoff.began_s), 3),
        "left_s": None if math.isinf(until_s) else round(max(0.0, until_s - now_s), 3),
        "waits_for": waits_for,
        "void": handoff.over,
        "num_readers": waiting.get(handoff.key, 0),
    }
