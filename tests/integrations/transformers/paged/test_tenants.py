"""Paged caches of tenants and salts on one store: pages are found by their own tenant and salt only, by ticket, too."""

from __future__ import annotations

import pytest

from kvstore.errors import NamespaceMismatch
from kvstore.integrations.transformers.paged import PagedStore

PROMPT = list(range(1, 65))
WAYS = ({"tenant": "b"}, {"tenant": "a"}, {}, {"tenant": "b", "salt": b"other"})


def test_pages_are_found_by_their_own_tenant_and_salt_only(small, private_store):
    one = small("full", private_store)
    one.store.close()
    stores = [PagedStore(private_store, one.cache, **way) for way in WAYS]
    writer = stores[0]
    request = one.index.acquire(PROMPT)
    one.prefill(request, PROMPT)
    for job in writer.save(request, PROMPT, len(PROMPT)):
        job.result(10)
    ticket = writer.publish(request, PROMPT, len(PROMPT))
    request.release()
    one.forget()
    for store in stores[1:]:
        held = one.index.acquire(PROMPT)
        assert store.load(held, PROMPT).num_tokens == 0
        with pytest.raises(NamespaceMismatch):
            store.fetch(held, [*PROMPT, 5], ticket)
        held.release()
    held = one.index.acquire([*PROMPT, 5])
    assert writer.load(held, [*PROMPT, 5]).num_tokens == len(PROMPT)
    held.release()
    for store in stores:
        store.close()
