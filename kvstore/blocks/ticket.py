"""Define a hand-off's ticket. The publisher of a request's blocks sends it to the worker that continues."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.blocks.codec import decoder, encode
from kvstore.blocks.part import WHOLE, Part
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import DIGEST_BYTES, MAX_PARTS, check_count, check_node_id, clip
from kvstore.errors import ConfigError, InvalidRequest, ProtocolError

TICKET_VERSION = 4
NONCE_BYTES = 16
_EPOCH_BYTES = 8

_MAGIC = b"RKVH"
_HEAD = _MAGIC + TICKET_VERSION.to_bytes(2, "little")
#: The fields after the head, by name, in this order.
_FIELDS = (
    "epoch", "nonce", "namespace", "num_blocks", "block_bytes", "block_order", "part", "expires_s", "slab", "is_early",
    "node_id",
)  # fmt: skip
_decode = decoder(tuple[bytes, bytes, bytes, int, int, int, tuple[int, int, int, int], float, int, bool, str])
_MOST_U16, _MOST_U32 = (1 << 16) - 1, (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTicket:
    """Names blocks that one client published for one fetch. Small; can be pickled, or sent as `to_bytes`.

    It is void in another life of its store, and after a change of any field except `expires_s`: see `name`. It does not
    say what its blocks are: whoever publishes or fetches adds the namespace and the hashes that it knows by itself.
    Without hashes, any holder of the ticket with the same namespace can read the blocks, once.

    Args:
        node_id: the node whose store has the blocks.
        epoch: the life of that store: 8 bytes, `bytes.fromhex` of the epoch in `Store.stats`.
        nonce: random, for this ticket alone.
        namespace: digest of the blocks' namespace; covers their shape. Only an early check compares it.
        num_blocks: stored blocks, from the request's first token on.
        block_bytes: of each.
        block_order: version of the order of bytes in a block. A ticket may name any, also one of a later raykv; a
            client refuses those of others (LayoutMismatch).
        part: which part of each block was published, as (tp_rank, tp_size, pp_rank, pp_size).
        slab: the memory of the node that holds the blocks: 0 is its arena, others are stages on GPUs.
        expires_s: the store keeps the blocks at least until then; seconds since 1970 by the publisher's clock. For
            people and routers: only the store decides. In a ticket that is made ahead of its blocks this is a guess;
            publishing returns the ticket with the real time. Equality of tickets ignores this field.
        is_early: the ticket travels before its blocks are published; a fetch also waits for the publication.

    Raises:
        InvalidRequest: a field is of another type, or out of a ticket's range.
    """

    node_id: str
    epoch: bytes
    namespace: bytes
    num_blocks: int
    block_bytes: int
    expires_s: float = field(compare=False)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    block_order: int = BLOCK_ORDER_VERSION
    part: tuple[int, int, int, int] = WHOLE.ranks
    slab: int = 0
    is_early: bool = False

    def __post_init__(self) -> None:
        plain: dict[str, object] = {
            "epoch": _check_bytes("epoch", self.epoch, _EPOCH_BYTES),
            "nonce": _check_bytes("nonce", self.nonce, NONCE_BYTES),
            "namespace": _check_bytes("namespace", self.namespace, DIGEST_BYTES),
            "num_blocks": check_count("num_blocks", self.num_blocks, 1, _MOST_U32),
            "block_bytes": check_count("block_bytes", self.block_bytes, 1, _MOST_U32),
            "block_order": check_count("block_order", self.block_order, 0, _MOST_U16),
            "slab": check_count("slab", self.slab, 0, _MOST_U32),
            "node_id": check_node_id("node_id", self.node_id),
            "expires_s": _check_expiry(self.expires_s),
            "part": _check_part(self.part),
        }
        if not isinstance(self.is_early, bool):
            raise InvalidRequest(f"is_early: wanted True or False, got {clip(self.is_early)}")
        for name, value in plain.items():  # Plain types only: a subclass cannot be sent.
            object.__setattr__(self, name, value)

    @property
    def num_bytes(self) -> int:
        """Bytes that a fetch of the ticket moves."""
        return self.num_blocks * self.block_bytes

    def name(self, namespace: bytes, last_hash: bytes = b"") -> bytes:
        """Return the 32 bytes by which the store of the blocks finds them.

        Publisher and reader each make them, of all fields but `expires_s` and `namespace`, and of what the ticket
        cannot decide. So a ticket that was forged, changed or sent with another prompt names nothing.

        Args:
            namespace: digest of the caller's own namespace.
            last_hash: of the caller's own blocks; empty where the ticket's holder is trusted.
        """
        fields = self._packed({"expires_s": 0.0, "namespace": namespace})
        return hashlib.sha256(b"raykv/ticket/4" + fields + last_hash).digest()

    def to_bytes(self) -> bytes:
        """Return the ticket as bytes, for channels that carry only bytes."""
        return self._packed({})

    def _packed(self, others: Mapping[str, object]) -> bytes:
        return _HEAD + encode([others[name] if name in others else getattr(self, name) for name in _FIELDS])

    @staticmethod
    def from_bytes(data: bytes) -> HandoffTicket:
        """Return the ticket that `to_bytes` wrote.

        Raises:
            InvalidRequest: these are not the bytes of a ticket of this version.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidRequest(f"ticket: wanted the bytes of a ticket, got {type(data).__name__}")
        data = bytes(data)
        if len(data) < len(_HEAD) or not data.startswith(_MAGIC):
            raise InvalidRequest(f"ticket: wanted the bytes of a ticket, got {len(data)} others: {clip(data)}")
        version = int.from_bytes(data[len(_MAGIC) : len(_HEAD)], "little")
        if version != TICKET_VERSION:
            raise InvalidRequest(
                f"ticket: wanted a ticket of version {TICKET_VERSION}, got version {version}; "
                "run one version of raykv everywhere"
            )
        try:
            fields = _decode(data[len(_HEAD) :])
        except ProtocolError as error:
            raise InvalidRequest(
                f"ticket: wanted all bytes of a ticket, got {len(data)}; they were cut or joined on their way ({error})"
            ) from error
        return HandoffTicket(**dict(zip(_FIELDS, fields, strict=True)))  # type: ignore[arg-type]


def _check_part(value: object) -> tuple[int, int, int, int]:
    if not isinstance(value, tuple) or len(value) != len(WHOLE.ranks):
        raise InvalidRequest(f"part: wanted (tp_rank, tp_size, pp_rank, pp_size), got {clip(value)}")
    try:
        return Part(*(check_count("part", number, 0, MAX_PARTS) for number in value)).ranks
    except ConfigError as error:
        raise InvalidRequest(f"part: wanted the ranks of a Part, got {clip(value)} ({error})") from error


def _check_expiry(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise InvalidRequest(f"expires_s: wanted seconds since 1970, got {clip(value)}")
    return seconds


def _check_bytes(name: str, value: object, num_bytes: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != num_bytes:
        advice = "; bytes.fromhex() makes bytes of hexadecimal digits" if isinstance(value, str) else ""
        raise InvalidRequest(f"{name}: wanted {num_bytes} bytes, got {clip(value)}{advice}")
    return bytes(value)


def expiry_after(ttl_s: float) -> float:
    """Return the time `ttl_s` seconds from now, for a ticket's `expires_s`."""
    return time.time() + ttl_s
