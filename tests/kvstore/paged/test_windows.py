"""Groups with a sliding window: what a match needs, what goes early, and what stays in the tree without pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.paged.allocator import PageAllocator
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup, longest_usable
from kvstore.paged.integrity import all_nodes, buffer_bytes
from kvstore.paged.node import RootKey
from kvstore.paged.tree import PrefixTree

#: A token sees 8 tokens, itself included: the last 7 before a boundary, which are in 2 pages of 4.
WINDOW = PageGroup(window_tokens=8)
BOTH = (PageGroup(), WINDOW)
TOKENS = list(range(32))


def make_cache(num_pages=20, groups=BOTH):
    return PagedPrefixCache(4, num_pages, groups)


def fill(cache, tokens, trims=False):
    request = cache.acquire(tokens)
    request.extend(len(tokens) - request.num_tokens)
    if trims:
        request.trim_windows(len(tokens))
    request.insert(tokens)
    request.release()
    cache.check_integrity()


def found(cache, tokens):
    return cache.match(tokens, reserve_last_token=False).num_tokens


def test_the_first_page_is_the_one_that_a_match_up_to_the_last_whole_page_needs():
    assert [WINDOW.first_page(num_tokens, 4) for num_tokens in (0, 7, 11, 12, 15, 16, 19, 20)] == [
        0, 0, 0, 1, 1, 2, 2, 3,
    ]  # fmt: skip
    assert PageGroup().first_page(100, 4) == 0


@pytest.mark.parametrize(("page_size", "align_tokens"), [(1, 4), (4, 8), (8, 4), (4, 4), (3, 1)])
def test_an_aligned_window_has_whole_blocks_up_to_the_last_one(page_size, align_tokens):
    group = PageGroup(window_tokens=6, align_tokens=align_tokens)
    for num_tokens in range(60):
        first = group.first_page(num_tokens, page_size) * page_size
        assert first % align_tokens == 0
        for unit in (page_size, align_tokens):  # Where a match and where a load or a hand-off may end.
            needed = max(0, num_tokens // unit * unit - 6 + 1)
            assert first <= needed
        assert first > num_tokens - 6 - 2 * (page_size + align_tokens)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "8"])
def test_a_wrong_alignment_is_refused(bad):
    with pytest.raises(ConfigError, match="align_tokens"):
        PageGroup(window_tokens=8, align_tokens=bad)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_usable_ends_are_those_with_a_whole_window(window, page_size):
    group, rng = PageGroup(window_tokens=window), np.random.default_rng(0)
    for _ in range(20):
        present = rng.random(12) < 0.8
        usable = longest_usable(present, group, page_size)
        for end in range(13):
            seen = range(max(0, end * page_size - window + 1), end * page_size)
            assert usable[end] == all(present[token // page_size] for token in seen)


@pytest.mark.parametrize("bad", [0, 1, -4, 2.5, True, "8"])
def test_a_window_of_nothing_is_refused(bad):
    with pytest.raises(ConfigError):
        PageGroup(window_tokens=bad)


def test_a_request_gets_the_pages_of_its_window_only():
    cache = make_cache()
    fill(cache, TOKENS)
    request = cache.acquire(TOKENS, reserve_last_token=False)
    assert (request.pages(0) >= 0).all()
    assert (request.pages(1) >= 0).tolist() == [False] * 6 + [True] * 2
    assert request.slots(20, 25, 1).tolist()[:4] == [-1] * 4
    assert [stats.num_locked for stats in cache.stats()] == [8, 2]


def test_pages_before_a_window_go_and_the_prefix_stays():
    cache = make_cache()
    fill(cache, TOKENS)
    request = cache.acquire(TOKENS, reserve_last_token=False)
    assert cache.evict(20, group=1) == 6
    assert [stats.num_cached + stats.num_locked for stats in cache.stats()] == [8, 2]
    request.release()
    assert found(cache, TOKENS) == 32
    assert found(cache, TOKENS[:28]) == 0, "its window is not there"


def test_a_match_ends_where_a_window_is_whole():
    cache = make_cache()
    fill(cache, TOKENS[:16])
    fill(cache, TOKENS)
    held = cache.acquire(TOKENS[:16], reserve_last_token=False)
    assert cache.evict(4, group=1) == 4
    # Of the longer prompt too few pages are left in the window, so the match ends at the shorter one.
    assert found(cache, TOKENS) in (16, 32)
    cache.evict(20, group=1)
    assert found(cache, TOKENS) == 16
    held.release()
    cache.check_integrity()


def test_a_leaf_without_a_window_goes_whole():
    cache = make_cache()
    fill(cache, TOKENS)
    assert cache.evict(20, group=1) == 8
    assert cache.num_nodes == 0
    assert [stats.num_free for stats in cache.stats()] == [20, 20]


def test_a_locked_node_may_lose_its_window_and_goes_with_its_last_request():
    cache = make_cache()
    fill(cache, TOKENS[:16])
    request = cache.acquire(TOKENS[:16], reserve_last_token=False)
    request.extend(16)
    request.trim_windows(32)
    assert cache.evict(20, group=1) == 4
    cache.check_integrity()
    assert found(cache, TOKENS[:16]) == 0
    request.release()
    assert cache.num_nodes == 0
    cache.check_integrity()


def test_long_requests_give_up_what_is_before_their_window():
    cache = make_cache()
    request = cache.acquire(TOKENS)
    free = []
    for done in range(1, 33):
        request.extend(1)
        request.trim_windows(done)
        free.append(cache.stats()[1].num_free)
    assert min(free) == 20 - 3
    assert cache.stats()[0].num_free == 12
    assert (request.pages(1)[:5] == -1).all()
    assert request.trim_windows(32) == 0


@pytest.mark.parametrize("window", [6, 8])
def test_what_is_trimmed_can_still_be_matched_at_its_end(window):
    cache = make_cache(groups=(PageGroup(), PageGroup(window_tokens=window)))
    fill(cache, TOKENS[:30], trims=True)
    assert found(cache, [*TOKENS[:28], 99]) == 28
    assert cache.stats()[0].num_cached == 7
    assert cache.stats()[1].num_cached == 2


def test_gaps_are_filled_by_a_request_that_computes_them_again():
    cache = make_cache()
    fill(cache, TOKENS, trims=True)
    assert found(cache, TOKENS[:16]) == 0
    fill(cache, TOKENS[:16])
    assert found(cache, TOKENS[:16]) == 16
    assert found(cache, TOKENS) == 32
    assert cache.stats()[1].num_cached == 6
    assert cache.stats()[0].num_free == 12


def test_the_end_of_a_leaf_is_not_cut_off_where_only_its_end_has_a_window():
    cache = make_cache()
    fill(cache, TOKENS, trims=True)
    assert cache.evict(1) == 8
    assert cache.num_nodes == 0
    fill(cache, TOKENS)
    assert cache.evict(1) == 1
    assert found(cache, TOKENS) == 28


def test_a_model_of_windows_alone():
    cache = make_cache(groups=(WINDOW,))
    fill(cache, TOKENS, trims=True)
    assert found(cache, TOKENS) == 32
    assert cache.stats()[0].num_cached == 2
    assert cache.evict(1) == 1
    assert found(cache, TOKENS) == 0
    cache.evict(20)
    assert cache.num_nodes == 0


def test_each_group_has_pages_of_its_own():
    cache = PagedPrefixCache(4, 20, (PageGroup(), PageGroup(window_tokens=8, num_pages=5)))
    request = cache.acquire(TOKENS)
    for done in range(4, 33, 4):
        request.extend(4)
        request.insert(TOKENS, done)
        request.trim_windows(done)
    assert [stats.num_pages for stats in cache.stats()] == [20, 5]
    assert [stats.num_locked for stats in cache.stats()] == [8, 2]
    request.release()
    cache.check_integrity()
    assert found(cache, TOKENS) == 32


def test_a_copy_is_made_in_each_group():
    cache = make_cache()
    fill(cache, TOKENS)
    request = cache.acquire([*TOKENS[:18], 99, 99])
    copies = request.prepare_copy()
    assert [(copy.group, copy.num_tokens) for copy in copies] == [(0, 2), (1, 2)]
    assert cache.stats()[1].num_locked == 3
    request.complete_copy()
    assert cache.stats()[1].num_locked == 2
    assert request.num_tokens == 18
    cache.check_integrity()
    request.release()
    cache.check_integrity()


def test_no_copy_of_a_page_that_a_window_gave_up():
    cache = make_cache()
    fill(cache, TOKENS[:16])
    fill(cache, TOKENS, trims=True)
    assert found(cache, TOKENS[:16]) == 16
    assert cache.match([*TOKENS[:18], 99]).num_partial_tokens == 0
    assert cache.acquire([*TOKENS[:18], 99]).prepare_copy() == ()


def test_a_split_leaves_no_leaf_without_a_window():
    cache = make_cache()
    fill(cache, TOKENS[:16])
    copier = cache.acquire([*TOKENS[:3], 99, 99])
    assert len(copier.prepare_copy()) == 2
    assert cache.evict(20, group=1) == 3, "the page that is copied stays"
    copier.abort_copy()
    request = cache.acquire(TOKENS, reserve_last_token=False)
    assert request.num_tokens == 4
    assert cache.num_nodes == 1
    cache.check_integrity()


def make_edge(num_pages):
    """Return a tree of one edge, and the edge."""
    allocators = (PageAllocator(num_pages, 4), PageAllocator(num_pages, 4))
    tree = PrefixTree(BOTH, allocators, 4)
    pages = [allocator.alloc(num_pages) for allocator in allocators]
    edge = tree.append(tree.root(RootKey(b"", b"")), bytes(range(16)) * num_pages, pages)
    tree.unlock(edge)
    return tree, edge


def test_a_page_that_outlasts_its_prompt_keeps_no_more_in_memory():
    tree, edge = make_edge(100)
    for num_pages in (1, 40, 20, 37):
        tree.trim_leaf(edge, num_pages)
    assert buffer_bytes(edge)[0] <= 2 * buffer_bytes(edge)[1]
    tree, edge = make_edge(100)
    tree.cut(tree.find(tree.root(RootKey(b"", b"")), bytes(range(16)) * 2, 8))
    for node in all_nodes(tree):
        assert buffer_bytes(node)[0] <= 2 * buffer_bytes(node)[1]


def test_a_removed_node_keeps_nothing_in_memory():
    tree, edge = make_edge(100)
    tree.remove_leaf(edge)
    assert buffer_bytes(edge)[0] == 0
