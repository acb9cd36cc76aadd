"""Hand-offs in `kv_transfer_params`, with the keys of vLLM's NixlConnector, so that its proxies work.

A request with `do_remote_decode` goes to a prefill engine. The answer carries the params for the decode engine:
`do_remote_prefill`, and the tickets of the prompt's full blocks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import clip
from kvstore.errors import InvalidRequest

TICKET = "raykv_ticket"
DO_PREFILL, DO_DECODE = "do_remote_prefill", "do_remote_decode"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The full blocks of a prompt, on their way from one engine to another.

    Args:
        tickets: one for each worker, by rank; each is good for that worker's part of all blocks.
        last_hash: of the last block. It covers all tokens up to there and everything else that decides their KV. So a
            request never gets blocks of another prompt, even if its params were changed on the way.
    """

    tickets: tuple[HandoffTicket, ...]
    last_hash: bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks, counted from the prompt's first token."""
        return self.tickets[0].num_blocks

    def is_for(self, hashes: BlockHashes) -> bool:
        """Whether these are blocks of the prompt with these hashes."""
        return self.num_blocks <= len(hashes) and hashes[self.num_blocks - 1] == self.last_hash

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` for the decode engine; plain values, for JSON."""
        parts = [base64.b64encode(ticket.to_bytes()).decode() for ticket in self.tickets]
        return {DO_PREFILL: True, DO_DECODE: False, TICKET: {"parts": parts, "last_hash": self.last_hash.hex()}}

    @staticmethod
    def from_params(params: Mapping[str, Any]) -> Handover:
        """Return the hand-off that `to_params` wrote.

        Raises:
            InvalidRequest: `to_params` did not make these params.
        """
        try:
            value = params[TICKET]
            parts = [base64.b64decode(part, validate=True) for part in value["parts"]]
            last_hash = bytes.fromhex(value["last_hash"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted what a prefill engine with RaykvConnector answered, got "
                f"{clip(params.get(TICKET))} ({type(error).__name__}: {error}); pass its params on as they are"
            ) from error
        tickets = tuple(HandoffTicket.from_bytes(part) for part in parts)
        if not tickets or len({ticket.num_blocks for ticket in tickets}) > 1 or tickets[0].num_blocks < 1:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted tickets of the same blocks for each worker, got tickets of "
                f"{clip([ticket.num_blocks for ticket in tickets])} blocks; pass the params on as they are"
            )
        return Handover(tickets=tickets, last_hash=last_hash)
