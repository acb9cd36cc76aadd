"""Make the image of a pool for its next life. No locking here: the pool holds its lock."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from kvstore.blocks.grants import PinKind
from kvstore.pool.handover.image import BlockColumns, OldReaders, OldWriters, PoolImage
from kvstore.pool.leases import LeaseTable
from kvstore.pool.slots import SlotTable
from kvstore.pool.writes import WriteTable

#: The owner of slots that a READ of the mover may still write to.
MOVER = "!mover"
#: Of a slot: the end of the last lease, and the owners of all.
_Read = tuple[float, frozenset[str]]


def export(table: SlotTable, leases: LeaseTable, writes: WriteTable) -> PoolImage:
    """Return the image of a pool. Nothing changes.

    A slot that is neither readable nor named in `writers` of the image has no reader and no writer.
    """
    namespaces = tuple(name for name, space in table.index.spaces.items() if space.ready)
    slots, spaces = list[int](), list[int]()
    for number, name in enumerate(namespaces):
        ready = table.index.spaces[name].ready.values()
        slots += ready
        spaces += [number] * len(ready)
    is_ready, readers = set(slots), _readers(leases)
    cleared = {slot: read for slot, read in readers.items() if slot not in is_ready}
    return PoolImage(
        generations=np.array(table.columns.generation, np.uint32),
        tenants=() if table.tenants is None else table.tenants.names[1:],
        owners=np.zeros(table.num_slots, np.uint8) if table.tenants is None else table.tenants.owners.copy(),
        namespaces=namespaces,
        blocks=_blocks(table, slots, spaces),
        writers=_writers(table, writes, cleared),
        readers=_grouped({slot: read for slot, read in readers.items() if slot in is_ready}),
    )


def _blocks(table: SlotTable, slots: list[int], spaces: list[int]) -> BlockColumns:
    index, eviction = table.index, table.eviction
    at = np.array(slots, np.intp)
    # Those that are evicted next come first; blocks of one touch in the order of their chain.
    touch, depth = np.frombuffer(eviction.stamp, np.int64)[at], np.frombuffer(index.depth, np.int64)[at]
    order = np.lexsort((depth, np.array(spaces, np.int64), touch))
    at, ordered = at[order], [slots[place] for place in order.tolist()]
    priority, until_s = eviction.terms_of(at)
    uses, used_s, touched_s = eviction.policy.history(at)
    roots = index.roots.of(ordered)
    return BlockColumns(
        slot=at.astype(np.int32), space=np.array(spaces, np.int32)[order],
        hashes=b"".join([index.block_hash[slot] for slot in ordered]),
        parents=b"".join([index.parent[slot] for slot in ordered]),
        depth=depth[order], touch=touch[order], priority=priority, until_s=until_s,
        uses=uses, used_s=used_s, touched_s=touched_s,
        roots=np.zeros(len(at), np.uint32) if roots is None else roots,
    )  # fmt: skip


def _readers(leases: LeaseTable) -> dict[int, _Read]:
    """Return the slots that a lease lets someone read, each with the end of the last such lease and all owners.

    A pin gives nobody a right to read, and what other tiers have pinned ends with their process.
    """
    until_s, owners = dict[int, float](), dict[int, frozenset[str] | set[str]]()
    for lease in leases.held.values():
        if lease.kind is PinKind.LEASE and not lease.is_lent:
            own, end_s = frozenset((lease.owner,)), lease.deadline_s  # One for all its slots: there may be millions.
            for slot in lease.slots:
                until_s[slot] = max(until_s.get(slot, -math.inf), end_s)
                known = owners.setdefault(slot, own)
                # A prefix may have thousands of owners: a set of its own for each further one would be quadratic.
                if isinstance(known, set):
                    known.add(lease.owner)
                elif lease.owner not in known:
                    owners[slot] = {*known, lease.owner}
    return {slot: (until_s[slot], frozenset(names)) for slot, names in owners.items()}


def _writers(table: SlotTable, writes: WriteTable, readers: dict[int, _Read]) -> tuple[OldWriters, ...]:
    """Return the slots of unfinished writes, of abandoned READs, and of cleared blocks that are still read.

    A slot that has both writers and readers keeps the rule of writers, and their time is the last one of all.
    """
    owners: dict[int, set[str]] = defaultdict(set)
    until_s = {slot: read_until_s for slot, (read_until_s, _) in readers.items()}
    for write in writes.held.values():
        for slot in write.slots[write.num_done :]:
            owners[slot].add(write.owner)
            if write.terms.deadline_s < math.inf:
                until_s[slot] = max(until_s.get(slot, -math.inf), write.terms.deadline_s)
    for quarantined in table.columns.quarantined.values():
        for slot in quarantined:
            owners[slot].add(MOVER)
    groups: dict[tuple[tuple[str, ...], float], list[int]] = defaultdict(list)
    for slot, names in owners.items():
        groups[tuple(sorted(names)), until_s.get(slot, 0.0)].append(slot)
    written = [OldWriters(names, end_s, np.array(sorted(held), np.int32)) for (names, end_s), held in groups.items()]
    only_read = _grouped({slot: read for slot, read in readers.items() if slot not in owners})
    return (*written, *(OldWriters((), read.until_s, read.slots, read.owners) for read in only_read))


def _grouped(readers: dict[int, _Read]) -> tuple[OldReaders, ...]:
    groups: dict[_Read, list[int]] = defaultdict(list)
    for slot, read in readers.items():
        groups[read].append(slot)
    return tuple(
        OldReaders(tuple(sorted(owners)), until_s, np.array(sorted(slots), np.int32))
        for (until_s, owners), slots in groups.items()
    )
