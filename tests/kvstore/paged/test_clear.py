"""After a clearing no new request finds what was computed before it, not even what is inserted later."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup

TOKENS = list(range(32))
BOTH = (PageGroup(), PageGroup(window_tokens=8))


def begin(cache, tokens, namespace=b"", salt=b"", num_tokens=None):
    """Begin a request, and insert what it computes."""
    request = cache.acquire(tokens, namespace, salt)
    request.extend((num_tokens or len(tokens)) - request.num_tokens)
    request.insert(tokens, request.num_tokens)
    return request


def found(cache, tokens=TOKENS, namespace=b"", salt=b""):
    return cache.match(tokens, namespace, salt, reserve_last_token=False).num_tokens


def test_pages_that_no_request_needs_are_free_at_once():
    cache = PagedPrefixCache(4, 20)
    begin(cache, TOKENS).release()
    begin(cache, [*TOKENS[:8], 99, 99, 99, 99]).release()
    assert cache.clear() == 9
    assert (found(cache), cache.num_nodes, cache.stats()[0].num_free) == (0, 0, 20)
    assert cache.clear() == 0
    cache.check_integrity()


def test_one_namespace_goes_with_all_its_salts():
    cache = PagedPrefixCache(4, 40)
    for namespace, salt in ((b"a", b""), (b"a", b"x"), (b"b", b"")):
        begin(cache, TOKENS, namespace, salt).release()
    assert cache.clear(b"a") == 16
    assert [found(cache, TOKENS, *spaces) for spaces in ((b"a", b""), (b"a", b"x"), (b"b", b""))] == [0, 0, 32]
    assert cache.clear(b"unknown") == 0
    assert cache.clear() == 8
    assert cache.num_nodes == 0


def test_a_request_keeps_its_pages_and_they_go_with_it():
    cache = PagedPrefixCache(4, 20)
    begin(cache, TOKENS).release()
    request = cache.acquire(TOKENS[:18])
    table = request.pages().tolist()
    assert cache.clear() == 4
    assert (found(cache), request.pages().tolist(), request.num_tokens) == (0, table, 16)
    assert cache.evict(20) == 0
    cache.check_integrity()
    request.release()
    assert (cache.num_nodes, cache.stats()[0].num_free) == (0, 20)


@pytest.mark.parametrize("num_before", [0, 3, 4, 16])
def test_what_a_running_request_inserts_later_is_not_found(num_before):
    """A request without a page in the tree has seen the old weights, too: its KV may be of both."""
    cache = PagedPrefixCache(4, 40)
    request = cache.acquire(TOKENS)
    request.extend(num_before)
    request.insert(TOKENS, num_before)
    cache.clear()
    request.extend(32 - num_before)
    assert request.insert(TOKENS) == 8 - num_before // 4
    assert found(cache) == 0
    young = begin(cache, TOKENS)
    assert set(young.pages().tolist()).isdisjoint(request.pages().tolist())
    assert found(cache) == 32
    cache.check_integrity()
    request.release()
    assert (found(cache), cache.stats()[0].num_locked) == (32, 8)
    young.release()
    assert cache.evict(40) == 8


def test_running_requests_share_their_pages_until_the_last_one_ends():
    cache = PagedPrefixCache(4, 20)
    first = begin(cache, TOKENS)
    second = cache.acquire(TOKENS, reserve_last_token=False)
    cache.clear()
    first.release()
    assert second.pages().tolist() == list(range(8))
    assert cache.stats()[0].num_locked == 8
    second.release()
    assert (cache.num_nodes, cache.stats()[0].num_free) == (0, 20)


def test_the_source_of_a_copy_stays_until_the_copy_ends():
    cache = PagedPrefixCache(4, 20)
    begin(cache, TOKENS).release()
    request = cache.acquire([*TOKENS[:6], 99])
    (copy,) = request.prepare_copy()
    assert cache.clear() == 0, "the edge of the source is locked"
    assert cache.evict(20) == 0
    request.complete_copy()
    assert cache.stats()[0].num_free == 20 - 2
    assert copy.target_page in request.pages()
    cache.check_integrity()
    request.release()
    assert cache.stats()[0].num_free == 20


def test_every_clearing_counts_in_any_order():
    """What began between two clearings is old after the second, whichever of them were for all."""
    cache, requests = PagedPrefixCache(4, 200), []
    for namespace in (b"a", None, b"a", b"a", None, None, b"b", b"a"):
        requests.append(begin(cache, TOKENS[:8], b"a"))
        cache.clear(namespace)
        assert found(cache, TOKENS[:8], b"a") == (8 if namespace == b"b" else 0)
        cache.check_integrity()
    for request in requests:
        request.extend(4)
        request.insert(TOKENS[:12])
    assert found(cache, TOKENS, b"a") == 0
    for request in requests:
        request.release()
    assert (cache.num_nodes, cache.stats()[0].num_free) == (0, 200)


def test_pages_before_a_window_are_free_though_their_edge_is_locked():
    cache = PagedPrefixCache(4, 20, BOTH)
    begin(cache, TOKENS).release()
    request = cache.acquire(TOKENS, reserve_last_token=False)
    assert cache.clear() == 6
    assert [stats.num_free for stats in cache.stats()] == [12, 18]
    cache.check_integrity()
    request.release()
    assert [stats.num_free for stats in cache.stats()] == [20, 20]


@pytest.mark.parametrize("bad", ["", 1, bytearray(b"a"), (b"a",)])
def test_what_is_no_namespace_is_refused(bad):
    cache = PagedPrefixCache(4, 20)
    begin(cache, TOKENS).release()
    with pytest.raises(InvalidRequest, match="as bytes, or None"):
        cache.clear(bad)
    assert found(cache) == 32
