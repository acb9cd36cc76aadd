"""Steps of tests on a small pool."""

from kvstore.blocks.chain import BlockHashes

SPACE, NUM_SLOTS, NEVER_S = b"n" * 32, 16, float("inf")


def chain(*numbers, space=SPACE):
    return BlockHashes(space, space, 0, b"".join(number.to_bytes(4, "little") * 8 for number in numbers))


def store(pool, hashes, tenant=""):
    ticket = pool.prepare_store(hashes, "writer", tenant=tenant)
    if ticket.write_id:
        pool.complete_store(ticket.write_id, "writer")
    pool.check_integrity()


def read(pool, hashes):
    """Pin and release; return the slots."""
    grant = pool.pin_prefix(hashes, "look", NEVER_S)
    pool.release(grant.lease_id, "look")
    pool.check_integrity()
    return list(grant.slots)
