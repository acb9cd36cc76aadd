"""Bound what each tenant of a pool holds: the slots of its blocks, and the slots that it pins.

In: the names of tenants with their limits, and the steps of the pool that give and take slots.
Out: how much a tenant may still have, and which of its own blocks go when it may have no more.
Floor: in the room of the pool, beside its other modules; docs/tenants.md has the rules.
"""
