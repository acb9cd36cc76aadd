"""What a prefix cache of pages finds, keeps, shares and gives back, in groups of full attention."""

from __future__ import annotations

import pytest

import kvstore.paged.node
import kvstore.paged.tree
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.errors import ConfigError, InvalidRequest, PoolExhausted
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup
from kvstore.paged.tokens import encode_tokens

SIZES = (1, 4, 16, 64, 256)


def tokens_of(num_pages, page_size, rest=0, seed=0):
    return [seed * 1_000_000 + index for index in range(num_pages * page_size + rest)]


def fill(cache, tokens, namespace=b"", salt=b""):
    """Serve a request whole, and release it. Returns its pages."""
    request = cache.acquire(tokens, namespace, salt)
    request.extend(len(tokens) - request.num_tokens)
    request.insert(tokens)
    pages = request.pages()
    assert request.release()
    cache.check_integrity()
    return pages.tolist()


def found(cache, tokens, namespace=b"", salt=b""):
    return cache.match(tokens, namespace, salt, reserve_last_token=False).num_tokens


def state(cache):
    return cache.stats(), cache.num_nodes


def test_an_empty_cache_finds_nothing():
    cache = PagedPrefixCache(4, 8)
    assert found(cache, []) == found(cache, [1, 2, 3, 4]) == 0
    request = cache.acquire([])
    assert (request.num_tokens, request.pages().tolist()) == (0, [])
    assert request.insert([]) == 0
    assert request.release()
    assert state(cache) == state(PagedPrefixCache(4, 8))


@pytest.mark.parametrize("page_size", SIZES)
def test_whole_pages_are_found(page_size):
    cache = PagedPrefixCache(page_size, 8)
    tokens = tokens_of(3, page_size, page_size - 1)
    pages = fill(cache, tokens)
    assert found(cache, tokens) == 3 * page_size
    match = cache.match([*tokens, 5])
    assert match.pages[0].tolist() == pages[:3]
    assert cache.stats()[0].num_cached == 3
    assert cache.stats()[0].num_private == 0


@pytest.mark.parametrize("page_size", SIZES)
def test_a_match_on_a_boundary_is_whole(page_size):
    """B14: a hit that ends on a boundary, of an edge too, is not trimmed."""
    cache = PagedPrefixCache(page_size, 8)
    tokens = tokens_of(3, page_size)
    fill(cache, tokens)
    for num_pages in (3, 2, 1):
        assert found(cache, tokens[: num_pages * page_size]) == num_pages * page_size
        request = cache.acquire(tokens[: num_pages * page_size], reserve_last_token=False)
        assert request.num_tokens == num_pages * page_size
        request.release()
    assert found(cache, tokens) == 3 * page_size


@pytest.mark.parametrize("page_size", SIZES)
def test_the_last_token_is_left_to_compute(page_size):
    """Scenario 1: at a length of k pages, with and without the last token."""
    cache = PagedPrefixCache(page_size, 8)
    tokens = tokens_of(3, page_size)
    fill(cache, tokens)
    assert cache.match(tokens).num_tokens == 2 * page_size
    assert cache.match(tokens).num_partial_tokens == page_size - 1
    assert cache.match(tokens, reserve_last_token=False).num_tokens == 3 * page_size


def test_equal_pages_at_two_positions_are_two_pages():
    """Scenario 1: a page is found behind its own prefix only."""
    cache = PagedPrefixCache(4, 8)
    fill(cache, [1, 2, 3, 4, 1, 2, 3, 4])
    assert found(cache, [1, 2, 3, 4, 1, 2, 3, 4]) == 8
    assert found(cache, [9, 2, 3, 4, 1, 2, 3, 4]) == 0


def test_an_evicted_page_hides_what_is_behind_it():
    """Scenarios 2 and 7: the leaf goes before the root, so every page that stays can be found."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(4, 4)
    fill(cache, tokens)
    for num_left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        assert found(cache, tokens) == 4 * num_left
        cache.check_integrity()
    assert cache.evict(1) == 0
    assert cache.num_nodes == 0


def test_a_match_changes_nothing():
    """B12 and scenario 3: 1000 probes that miss, and some that hit; then all can be evicted, in the order of use."""
    cache = PagedPrefixCache(4, 8)
    old, young = tokens_of(2, 4, seed=1), tokens_of(2, 4, seed=2)
    fill(cache, old)
    fill(cache, young)
    before = state(cache)
    for seed in range(1000):
        assert found(cache, tokens_of(2, 4, seed=seed + 3)) == 0
        found(cache, old)
        found(cache, old[:6])
    assert state(cache) == before
    cache.evict(2)
    assert (found(cache, old), found(cache, young)) == (0, 8)
    cache.evict(8)
    assert state(cache) == state(PagedPrefixCache(4, 8))


def test_what_a_match_returns_is_the_callers():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    pages = fill(cache, tokens)
    cache.match(tokens, reserve_last_token=False).pages[0][:] = -1
    assert cache.match(tokens, reserve_last_token=False).pages[0].tolist() == pages
    cache.check_integrity()


def test_a_locked_prefix_outlasts_every_eviction():
    """Scenarios 3 and 8: acquire finds and locks in one step; what a request reads stays until it is released."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    pages = fill(cache, tokens)
    request = cache.acquire(tokens[:9])
    assert cache.evict(8) == 1
    assert (request.pages().tolist(), found(cache, tokens)) == (pages[:2], 8)
    request.release()
    assert cache.evict(8) == 2


def test_each_request_has_a_lock_of_its_own():
    """Scenario 4: three requests, three releases; one more release changes nothing."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(2, 4)
    fill(cache, tokens)
    requests = [cache.acquire(tokens, reserve_last_token=False) for _ in range(3)]
    for request in requests:
        assert cache.evict(8) == 0
        assert request.release()
        assert not request.release()
    assert cache.evict(8) == 2


def test_a_full_cache_refuses_at_once_and_recovers():
    """Scenario 5: nothing is half taken, and one release makes room."""
    cache = PagedPrefixCache(4, 4)
    first, second = cache.acquire(tokens_of(2, 4, seed=1)), cache.acquire(tokens_of(3, 4, seed=2))
    first.extend(8)
    before = state(cache)
    with pytest.raises(PoolExhausted, match="wanted 3 pages of group 0, 2 are free and 0 can be"):
        second.extend(12)
    with pytest.raises(PoolExhausted):
        second.prepare_step(12)
    assert state(cache) == before
    first.release()
    assert len(second.extend(12)[0]) == 12


def test_a_locked_oldest_page_does_not_stop_eviction():
    """Scenario 6."""
    cache = PagedPrefixCache(4, 8)
    old, young = tokens_of(2, 4, seed=1), tokens_of(2, 4, seed=2)
    fill(cache, old)
    fill(cache, young)
    cache.acquire(old, reserve_last_token=False)
    assert cache.evict(2) == 2
    assert (found(cache, old), found(cache, young)) == (8, 0)


def test_a_use_is_a_request_and_its_release():
    cache = PagedPrefixCache(4, 8)
    old, young = tokens_of(2, 4, seed=1), tokens_of(2, 4, seed=2)
    fill(cache, old)
    fill(cache, young)
    cache.acquire(old, reserve_last_token=False).release()
    cache.evict(2)
    assert (found(cache, old), found(cache, young)) == (8, 0)


def test_the_request_that_ended_last_is_the_last_to_go():
    cache = PagedPrefixCache(4, 8)
    first, second = tokens_of(2, 4, seed=1), tokens_of(2, 4, seed=2)
    fill(cache, first)
    fill(cache, second)
    requests = [cache.acquire(tokens, reserve_last_token=False) for tokens in (first, second)]
    for request in reversed(requests):
        request.release()
    cache.evict(2)
    assert (found(cache, first), found(cache, second)) == (8, 0)


def test_room_is_made_for_new_tokens():
    cache = PagedPrefixCache(4, 4)
    fill(cache, tokens_of(2, 4, seed=1))
    fill(cache, tokens_of(2, 4, seed=2))
    request = cache.acquire(tokens_of(3, 4, seed=3))
    request.extend(12)
    assert (found(cache, tokens_of(2, 4, seed=1)), found(cache, tokens_of(2, 4, seed=2))) == (0, 4)


def test_an_aborted_request_leaves_nothing():
    """Scenario 10: what was not inserted is never found, and its pages are free."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    request = cache.acquire(tokens)
    request.extend(12)
    request.release()
    assert found(cache, tokens) == 0
    assert cache.stats()[0].num_free == 8
    fill(cache, tokens)
    assert found(cache, tokens) == 12


def test_only_what_is_computed_is_found():
    """Scenario 12: pages that have slots, but no KV yet, are not in the tree."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    request = cache.acquire(tokens)
    request.extend(12)
    assert [request.insert(tokens, count) for count in (3, 4, 7, 11, 11)] == [0, 1, 0, 1, 0]
    assert found(cache, tokens) == 8


def test_the_first_of_two_equal_pages_stays():
    """Scenarios 11 and 13: both requests keep the pages that they have, and the second copy goes with its owner."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(2, 4)
    first, second = cache.acquire(tokens), cache.acquire(tokens)
    first.extend(8)
    second.extend(8)
    tables = first.pages().tolist(), second.pages().tolist()
    assert (first.insert(tokens), second.insert(tokens)) == (2, 0)
    assert (first.pages().tolist(), second.pages().tolist()) == tables
    assert cache.match([*tokens, 0]).pages[0].tolist() == tables[0]
    assert cache.stats()[0].num_private == 2
    first.release()
    assert cache.evict(8) == 0, "the second request builds on the pages of the tree"
    second.release()
    assert cache.evict(8) == 2
    assert cache.stats()[0].num_free == 8


def test_a_duplicate_and_what_follows_it():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(4, 4)
    second = cache.acquire(tokens)
    second.extend(16)
    fill(cache, tokens[:8])
    assert second.insert(tokens) == 2
    cache.check_integrity()
    assert cache.stats()[0].num_private == 2
    second.release()
    cache.check_integrity()
    assert found(cache, tokens) == 16


@pytest.mark.parametrize("rest", [1, 3, 4])
def test_last_pages_of_every_length(rest):
    """Scenario 14: the partial page is its request's own, and is freed with it."""
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(1, 4, rest)
    request = cache.acquire(tokens)
    request.extend(len(tokens))
    request.insert(tokens)
    assert cache.stats()[0].num_private == (rest < 4)
    request.release()
    assert cache.stats()[0].num_free == 8 - len(tokens) // 4


@pytest.mark.parametrize("page_size", SIZES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_need_not_be_pages(page_size, chunk):
    """B15: a token's offset in its page is its position modulo the page, whatever the chunks were."""
    cache = PagedPrefixCache(page_size, 600)
    tokens = tokens_of(2, page_size, page_size // 2)
    fill(cache, tokens[: page_size + 1])
    request = cache.acquire(tokens)
    start = request.num_tokens
    slots = []
    while request.num_tokens < len(tokens):
        slots += request.extend(min(chunk, len(tokens) - request.num_tokens))[0].tolist()
        request.insert(tokens, request.num_tokens)
    assert [slot % page_size for slot in slots] == [at % page_size for at in range(start, len(tokens))]
    assert slots == request.slots(start, len(tokens)).tolist()
    cache.check_integrity()


def test_namespaces_and_salts_share_nothing():
    """Scenario 17: no pair of namespace and salt is taken for another, joined or not."""
    cache = PagedPrefixCache(4, 16)
    tokens = tokens_of(2, 4)
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    spaces = [(b"", b""), (b"ab", b""), (b"a", b"b"), (b"", b"ab"), (Namespace(model="m", shape=shape).digest, b"")]
    for number, (namespace, salt) in enumerate(spaces):
        assert found(cache, tokens, namespace, salt) == 0
        fill(cache, tokens, namespace, salt)
        assert cache.stats()[0].num_cached == 2 * number + 2
    cache.evict(16)
    assert state(cache) == state(PagedPrefixCache(4, 16))


class SameHash(bytes):
    """Keys that all fall into one place of a dict."""

    def __hash__(self):
        return 1


def test_children_whose_keys_collide_are_two_children(monkeypatch):
    """B13: with a constant hash both pages are found, and the totals are right."""
    monkeypatch.setattr(kvstore.paged.tree, "page_key", lambda data, at, size: SameHash(data[at : at + size]))
    monkeypatch.setattr(kvstore.paged.node.Node, "first_key", lambda node, size: SameHash(bytes(node.data[: size * 4])))
    cache = PagedPrefixCache(4, 8)
    one, other = tokens_of(2, 4, seed=1), tokens_of(2, 4, seed=2)
    pages = fill(cache, one) + fill(cache, other)
    assert len(set(pages)) == 4
    assert (found(cache, one), found(cache, other), cache.stats()[0].num_cached) == (8, 8, 4)
    assert cache.evict(8) == 4


def test_an_edge_is_split_where_prompts_part():
    cache = PagedPrefixCache(4, 16)
    one = tokens_of(4, 4)
    other = [*one[:8], 7, 7, 7, 7, 7, 7, 7, 7]
    first = fill(cache, one)
    second = fill(cache, other)
    assert second[:2] == first[:2]
    assert (found(cache, one), found(cache, other), cache.num_nodes) == (16, 16, 3)
    assert cache.stats()[0].num_cached == 6


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_partly_equal_page_is_copied(num_tokens):
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    pages = fill(cache, tokens)
    request = cache.acquire([*tokens[: 4 + num_tokens], 99, 99])
    (copy,) = request.prepare_copy()
    assert (copy.group, copy.source_page, copy.num_tokens) == (0, pages[1], num_tokens)
    assert copy.target_page not in pages
    assert cache.evict(8) == 0, "the source is locked"
    with pytest.raises(InvalidRequest, match="complete or abort"):
        request.extend(1)
    assert request.complete_copy() == num_tokens
    assert request.num_cached_tokens == request.num_tokens == 4 + num_tokens
    assert request.pages().tolist() == [pages[0], copy.target_page]
    assert request.extend(1)[0].tolist() == [copy.target_page * 4 + num_tokens]
    cache.check_integrity()
    request.release()
    assert cache.evict(8) == 3


def test_of_several_children_the_most_equal_page_is_copied():
    cache = PagedPrefixCache(4, 16)
    for last in ([1, 2, 0, 0], [1, 2, 3, 0], [1, 9, 9, 9], [2, 0, 0, 0]):
        pages = fill(cache, [5, 5, 5, 5, *last])
        if last == [1, 2, 3, 0]:
            best = pages[1]
    request = cache.acquire([5, 5, 5, 5, 1, 2, 3, 4, 4])
    (copy,) = request.prepare_copy()
    assert (copy.source_page, copy.num_tokens) == (best, 3)
    request.abort_copy()
    assert request.num_tokens == 4
    assert cache.stats()[0].num_private == 0


def test_no_copy_where_nothing_is_equal_or_nothing_is_free():
    cache = PagedPrefixCache(4, 3)
    tokens = tokens_of(3, 4)
    assert cache.acquire([]).prepare_copy() == ()
    fill(cache, tokens)
    assert cache.acquire([99, 98]).prepare_copy() == ()
    request = cache.acquire([*tokens[:10], 99])
    holder = cache.acquire(tokens, reserve_last_token=False)
    assert request.prepare_copy() == ()
    holder.release()
    cache.check_integrity()
    assert cache.evict(3) == 1


def test_a_copy_is_ended_once_and_by_a_release():
    """Scenario 9: the page that a copy writes is not given to others before the copy was ended."""
    cache = PagedPrefixCache(4, 4)
    fill(cache, tokens_of(2, 4))
    request = cache.acquire(tokens_of(1, 4, 3))
    for call in (request.complete_copy, request.abort_copy):
        with pytest.raises(InvalidRequest, match="wanted a prepared copy"):
            call()
    (copy,) = request.prepare_copy()
    other = cache.acquire(tokens_of(1, 4, seed=9))
    assert copy.target_page not in other.extend(4)[0] // 4
    with pytest.raises(InvalidRequest):
        request.prepare_copy()
    request.release()
    assert cache.stats()[0].num_private == 1
    cache.check_integrity()


def test_no_copy_behind_other_tokens():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(3, 4)
    fill(cache, tokens)
    request = cache.acquire(tokens[:7])
    request.prepare_step(2)
    with pytest.raises(InvalidRequest, match="incomplete step"):
        request.prepare_copy()
    request.complete_step(0)
    request.extend(1)
    with pytest.raises(InvalidRequest, match="right after acquire"):
        request.prepare_copy()
    assert cache.stats()[0].num_private == 1
    # After an insert the request has whole pages of the tree again, and may have fewer tokens than its prompt had.
    request = cache.acquire([*[5] * 4, *tokens[:7]])
    request.extend(4)
    request.insert([5] * 4)
    assert request.prepare_copy() == ()
    cache.check_integrity()


def test_rejected_drafts_leave_no_pages():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(1, 4, 2)
    request = cache.acquire(tokens)
    request.extend(6)
    assert request.prepare_step(5)[0].tolist() == [6, 7, 8, 9, 10]
    with pytest.raises(InvalidRequest, match="incomplete step"):
        request.extend(1)
    request.complete_step(1)
    assert (request.num_tokens, cache.stats()[0].num_free) == (7, 6)
    request.prepare_step(9)
    request.release()
    assert cache.stats()[0].num_free == 8


def test_other_tokens_than_those_found_are_refused():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(2, 4)
    fill(cache, tokens)
    request = cache.acquire([*tokens, 7, 7, 7, 7])
    request.extend(4)
    before = state(cache)
    for bad in ([9, *tokens[1:], 7, 7, 7, 7], [*tokens, 7, 7, 7], [-1] * 12, None):
        with pytest.raises(InvalidRequest):
            request.insert(bad)
    with pytest.raises(InvalidRequest):
        request.insert([*tokens, 7, 7, 7, 7], 13)
    assert state(cache) == before
    # Behind what was found, a request may have other tokens than its prompt had, for example generated ones.
    assert request.insert([*tokens, 8, 8, 8, 8]) == 1


def test_other_tokens_than_those_copied_are_refused():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(2, 4)
    fill(cache, tokens)
    request = cache.acquire([*tokens[:7], 50])
    assert request.prepare_copy()
    other = [*tokens[:5], 9, 9, 9]
    with pytest.raises(InvalidRequest, match="began with"):
        request.insert(other, 4)
    request.complete_copy()
    request.extend(1)
    assert request.insert(tokens[:6], 4) == 0
    for bad in (other, other[:6], tokens[:3]):
        with pytest.raises(InvalidRequest):
            request.insert(bad, 0)
    assert request.insert([*tokens[:7], 51]) == 1
    assert found(cache, other) == 4
    # A copy that was given up leaves no tokens behind.
    request = cache.acquire([*tokens[:7], 50])
    assert request.prepare_copy()
    request.abort_copy()
    request.extend(4)
    assert request.insert(other) == 1


def test_a_copy_behind_computed_tokens_is_no_part_of_the_cached_prefix():
    cache = PagedPrefixCache(4, 8)
    tokens = tokens_of(2, 4)
    request = cache.acquire([*tokens[:7], 50])
    fill(cache, tokens)
    request.extend(4)
    request.insert([*tokens[:7], 50], 4)
    assert request.prepare_copy()
    assert request.complete_copy() == 3
    assert (request.num_tokens, request.num_cached_tokens) == (7, 0)


def test_a_released_request_does_nothing():
    cache = PagedPrefixCache(4, 8)
    request = cache.acquire([1, 2, 3])
    request.release()
    before = state(cache)
    calls = (
        lambda: request.extend(1), lambda: request.prepare_step(1), lambda: request.complete_step(0),
        request.prepare_copy, lambda: request.insert([1, 2, 3]), lambda: request.trim_windows(0),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidRequest, match="released"):
            call()
    with pytest.raises(InvalidRequest):
        request.slots(0, 1)
    assert (request.num_tokens, request.is_released, state(cache)) == (0, True, before)


@pytest.mark.parametrize("bad", [-1, 1.0, "1", None, True])
def test_what_is_no_count_or_group_is_refused(bad):
    cache = PagedPrefixCache(4, 8)
    request = cache.acquire([1, 2, 3])
    request.extend(3)
    before = state(cache)
    calls = (
        lambda: request.extend(bad), lambda: request.prepare_step(bad), lambda: request.complete_step(bad),
        lambda: request.pages(bad), lambda: request.slots(bad, 1), lambda: request.slots(0, bad),
        lambda: request.trim_windows(bad), lambda: cache.evict(bad), lambda: cache.evict(1, bad),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()
    for call in (lambda: request.pages(1), lambda: cache.evict(1, 1), lambda: request.slots(0, 4)):
        with pytest.raises(InvalidRequest):
            call()
    assert state(cache) == before


@pytest.mark.parametrize("bad", [[-1], [1 << 32], [1.5], [[1]], "ab", None, 5])
def test_what_are_no_tokens_is_refused(bad):
    cache = PagedPrefixCache(4, 8)
    for call in (cache.match, cache.acquire, encode_tokens):
        with pytest.raises(InvalidRequest, match="encode_tokens"):
            call(bad)
    with pytest.raises(InvalidRequest, match="as bytes"):
        cache.acquire([1], "model")
    assert cache.num_requests == 0


@pytest.mark.parametrize("sizes", [(0, 4), (257, 4), (4, 0), (4.0, 4), (4, None)])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(ConfigError):
        PagedPrefixCache(*sizes)
    with pytest.raises(ConfigError, match="at least one"):
        PagedPrefixCache(4, 4, groups=())


def test_pages_that_the_engine_took_are_not_the_caches():
    cache = PagedPrefixCache(4, 4)
    own = cache.allocators[0].alloc(2)
    with pytest.raises(PoolExhausted):
        cache.acquire([1] * 12).extend(12)
    cache.allocators[0].free(own)
    assert len(cache.acquire([1] * 12).extend(12)[0]) == 12


def test_a_page_of_the_tree_that_somebody_shares_is_not_given_away():
    """B3: eviction gives up the tree's reference only."""
    cache = PagedPrefixCache(4, 2)
    pages = fill(cache, tokens_of(2, 4))
    cache.allocators[0].share(pages[1:])
    assert cache.evict(2) == 1
    with pytest.raises(PoolExhausted):
        cache.acquire([1] * 8).extend(8)
    assert cache.allocators[0].free(pages[1:]) == 1
    cache.check_integrity()


def test_one_group_that_is_not_in_a_list_is_refused():
    with pytest.raises(ConfigError, match="at least one PageGroup"):
        PagedPrefixCache(4, 4, PageGroup())


def test_a_step_is_prepared_before_it_is_completed():
    request = PagedPrefixCache(4, 8).acquire([1, 2, 3])
    with pytest.raises(InvalidRequest, match="prepare_step"):
        request.complete_step(0)
    request.prepare_step(0)
    request.complete_step(0)
    with pytest.raises(InvalidRequest, match="prepare_step"):
        request.complete_step(0)
    request.release()
