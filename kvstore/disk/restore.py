"""Fill the pool of a disk tier from its index file, when a store begins."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvstore.blocks.chain import BlockHashes, root_key_of
from kvstore.blocks.indexes import ints_in
from kvstore.disk.places import Places, TierContext
from kvstore.disk.records import Record, hashes_of, runs_of
from kvstore.errors import KVStoreError
from kvstore.pool.pool import Pool
from kvstore.quotas import TenantQuota, tag_of

logger = logging.getLogger(__name__)

OWNER = "disk-restore"


def usable(
    records: Sequence[Record], num_places: int, slot_bytes: int, version_of: Callable[[bytes], int]
) -> list[Record]:
    """Return the records whose blocks may be used: whole, not cleared since, and the newest of each block."""
    newest: dict[bytes, Record] = {}
    for record in records:
        if (
            record.place >= num_places
            or record.num_bytes > slot_bytes
            or record.version != version_of(record.namespace)
        ):
            continue
        other = newest.get(record.block_hash)
        if other is None or other.generation < record.generation:
            newest[record.block_hash] = record
    return list(newest.values())


def restore(
    pool: Pool,
    places: Places,
    records: Sequence[Record],
    num_clears: Mapping[bytes, int],
    tenants: Sequence[TenantQuota] = (),
) -> int:
    """Make blocks of the disk findable; return how many. The pool is empty, and nothing else stores in it yet.

    The runs that were written last are claimed last, so that they are evicted last.

    Args:
        pool: of the disk.
        places: of its slots.
        records: the blocks, of `usable`.
        num_clears: of each namespace, noted before `usable` read its version: blocks of a namespace that was cleared
            since then are left out.
        tenants: of the store; the blocks of others are shared.
    """
    spaces: dict[bytes, list[Record]] = defaultdict(list)
    for record in records:
        spaces[record.namespace].append(record)
    runs = [run for blocks in spaces.values() for run in runs_of(blocks)]
    root_keys = _root_keys_of(runs)
    # A run may come before the one that it hangs on: the pool takes children whose parent comes later.
    runs.sort(key=lambda run: run[-1].generation)
    num_restored, names = 0, {tag_of(quota.name): quota.name for quota in tenants}
    for run in runs:
        first = run[0]
        try:
            root_key = root_keys[first.namespace, first.block_hash]
            chain = BlockHashes(first.namespace, first.parent, first.depth, hashes_of(run), root_key)
            ticket = pool.prepare_store(
                chain, OWNER, needs_parent=False, num_clears=num_clears[first.namespace],
                tenant=names.get(first.tenant_tag, ""),
            )  # fmt: skip
        except KVStoreError as error:
            logger.warning("blocks of the disk are left out: %s", error)
            continue
        slots, indexes = ints_in(ticket.packed_slots).tolist(), ints_in(ticket.packed_indexes).tolist()
        for slot, index in zip(slots, indexes, strict=True):
            places.assign(slot, run[index])
        num_restored += pool.complete_store(ticket.write_id, OWNER) if ticket.write_id else 0
    return num_restored


def _root_keys_of(runs: Sequence[Sequence[Record]]) -> dict[tuple[bytes, bytes], int]:
    """Return the root keys of blocks by namespace and hash; 0 where the way to the root is not on this disk.

    Args:
        runs: each after the one that it hangs on, as `runs_of` returns them.
    """
    found = dict[tuple[bytes, bytes], int]()
    for run in runs:
        first = run[0]
        is_root = first.parent == first.namespace
        root_key = root_key_of(first.block_hash) if is_root else found.get((first.namespace, first.parent), 0)
        found.update(((record.namespace, record.block_hash), root_key) for record in run)
    return found


def restore_old(context: TierContext, tenants: Sequence[TenantQuota]) -> int:
    """Make the blocks findable that the index of an earlier store names; return how many. Waits for the disk."""
    slots, found = context.slots, context.index.read_all()
    # Before the versions are read: a clearing between the two makes the claim fail.
    num_clears = {record.namespace: context.disk_pool.num_clears(record.namespace) for record in found}
    num_whole = min(slots.num_slots, context.disk_pool.num_slots)
    records = usable(found, num_whole, slots.slot_bytes, context.version_of)
    return restore(context.disk_pool, context.places, records, num_clears, tenants)
