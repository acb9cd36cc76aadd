"""Look into a pool while it works: namespaces, chains, leases.

In: a pool, and a namespace, hashes or the id of a lease.
Out: counts and runs of blocks; no bytes of blocks.
Floor: in the room of the pool, above its other modules; a pool that nobody looks into never runs this.
"""
