"""Name the owners of leases, pins and hand-offs for people: the process or host behind a name, and what ends it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvstore.pool.handover.adoption import OLD_READER
from kvstore.rpc.server import ControlServer

#: Owners whose process the store watches.
_WORKERS = ("client-", "local-")
_PEER, _RAY, _ADOPT, _BRING = "store-", "ray:", "adopt", "bring-"
_MOST_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPlace:
    """Where an owner is: the id of its process on this node, or the host of a peer's store. 0 and "" if not known.

    A worker of this node has its `tenant`, too.
    """

    pid: int = 0
    host: str = ""
    tenant: str = ""


def places_of(server: ControlServer) -> dict[str, OwnerPlace]:
    """Return where the owners of a server's connections are. Any thread may call."""
    found = dict[str, OwnerPlace]()
    for connection in list(server.connections):  # A copy, which is made in one step.
        place = OwnerPlace(host=connection.host)
        if connection.local:
            place = OwnerPlace(pid=connection.pid, tenant=connection.tenant)
        found.setdefault(connection.owner, place)
    return found


def shown_owner(owner: str) -> str:
    """Return the name of an owner without what is a secret: a peer's name has the key by which its leases end."""
    if owner.startswith(_PEER):
        return f"{_PEER}{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
    return owner[:_MOST_CHARS]


def ticket_name(key: bytes) -> str:
    """Return a short name of a ticket. Its key is a secret: with it a reader can have the blocks."""
    return hashlib.sha256(key).hexdigest()[:12]


def ends_with(owner: str, *, has_deadline: bool, is_of_tier: bool = False) -> list[str]:
    """Return what ends a lease or a pin of an owner, whichever comes first."""
    deadline = ["deadline"] if has_deadline else []
    if is_of_tier:
        return ["the disk's write"]
    if owner.startswith(_WORKERS):
        return ["release", *deadline, "end of its process"]
    if owner.startswith(_PEER):
        return ["release", "end of its READ", *deadline]
    if owner.startswith((_ADOPT, _BRING)):
        return ["end of its load", *deadline]
    return deadline if owner.startswith(OLD_READER) else ["release", *deadline]
