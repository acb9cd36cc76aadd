"""What `kv_transfer_params` say: hand-offs, and how much a request's blocks matter.

Hand-offs have the keys of vLLM's NixlConnector, so that its proxies work.

A request with `do_remote_decode` goes to a prefill engine. The answer carries the params for the decode engine:
`do_remote_prefill`, and the tickets of the prompt's full blocks.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.blocks.priority import Priority, check_terms
from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import clip
from kvstore.errors import InvalidRequest

TICKET = "raykv_ticket"
DO_PREFILL, DO_DECODE = "do_remote_prefill", "do_remote_decode"
PRIORITY, PRIORITY_S = "raykv_priority", "raykv_priority_s"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """The place where one worker publishes; its tickets name it.

    Args:
        node_id: of the worker's store.
        epoch: of that store.
        part: the worker's part of every block, as (tp_rank, tp_size, pp_rank, pp_size).
        slab: the memory that it publishes in: 0 for the store's arena, another number for a stage on the worker's GPU.
    """

    node_id: str
    epoch: str
    part: tuple[int, int, int, int]
    slab: int = 0


def to_params(tickets: Sequence[HandoffTicket]) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the decode engine; plain values, for JSON.

    They do not say what the blocks are: both engines make the hashes from the prompt that each of them has.

    Args:
        tickets: one for each worker, by rank; each is good for that worker's part of all blocks.
    """
    parts = [base64.b64encode(ticket.to_bytes()).decode() for ticket in tickets]
    return {DO_PREFILL: True, DO_DECODE: False, TICKET: {"parts": parts}}


def from_params(params: Mapping[str, Any]) -> tuple[HandoffTicket, ...]:
    """Return the tickets that `to_params` wrote.

    Raises:
        InvalidRequest: `to_params` did not make these params.
    """
    try:
        parts = [base64.b64decode(part, validate=True) for part in params[TICKET]["parts"]]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequest(
            f"kv_transfer_params[{TICKET!r}]: wanted what a prefill engine with RaykvConnector answered, got "
            f"{clip(params.get(TICKET))} ({type(error).__name__}: {error}); pass its params on as they are"
        ) from error
    return tuple(HandoffTicket.from_bytes(part) for part in parts)


def read_priority(params: Mapping[str, Any], req_id: str) -> tuple[Priority, float | None]:
    """Return priority and seconds for `Client.save`; after a warning NORMAL, if the params have a bad value."""
    asked = params.get(PRIORITY)
    try:
        return check_terms(Priority.NORMAL if asked is None else asked, params.get(PRIORITY_S))
    except InvalidRequest as error:
        logger.warning("blocks of request %s are saved as any others: kv_transfer_params: raykv_%s", req_id, error)
        return Priority.NORMAL, None
