"""A decode that inserts page by page makes one edge, whatever others do with it in between."""

from __future__ import annotations

import pytest

from kvstore.errors import PoolExhausted
from kvstore.paged.allocator import PageAllocator
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup
from kvstore.paged.integrity import buffer_bytes
from kvstore.paged.node import RootKey
from kvstore.paged.tree import PrefixTree

WINDOW = PageGroup(window_tokens=9)


def start(cache, num_pages=1):
    """Begin a request that has so many pages in the tree."""
    request, tokens = cache.acquire([]), []
    decode(cache, request, tokens, num_pages)
    return request, tokens


def decode(cache, request, tokens, num_pages, trims=False):
    for _ in range(num_pages):
        tokens += [len(tokens) + at for at in range(cache.page_size)]
        request.extend(cache.page_size)
        assert request.insert(tokens) == 1
        if trims:
            request.trim_windows(len(tokens))


def found(cache, tokens):
    return cache.match(tokens, reserve_last_token=False).num_tokens


def test_the_buffers_of_an_edge_double():
    allocator = PageAllocator(8192, 4)
    tree = PrefixTree((PageGroup(),), (allocator,), 4)
    edge = tree.append(tree.root(RootKey(b"", b"")), bytes(16), [allocator.alloc(1)])
    rooms = []
    for number in range(1, 8192):
        data = number.to_bytes(16, "little")
        assert tree.append(edge, data, [allocator.alloc(1)]) is edge
        if not rooms or edge.room is not rooms[-1]:
            rooms.append(edge.room)
            assert buffer_bytes(edge)[0] <= 2 * buffer_bytes(edge)[1]
    assert [len(room.pages[0]) for room in rooms] == [2**power for power in range(1, 14)]
    assert edge.num_pages == edge.end_page == 8192
    assert edge.pages[0].tolist() == list(range(8192))
    assert bytes(edge.data[-16:]) == data


@pytest.mark.parametrize("groups", [(PageGroup(),), (PageGroup(), WINDOW)], ids=["full", "window"])
def test_8192_pages_of_one_decode_are_one_edge(groups):
    cache = PagedPrefixCache(4, 9000, groups)
    request, tokens = start(cache, 8192)
    cache.check_integrity()
    assert cache.num_nodes == 1
    assert found(cache, tokens) == found(cache, [*tokens, 7]) == 4 * 8192
    table = request.pages()
    assert cache.match(tokens, reserve_last_token=False).pages[0].tolist() == table.tolist()
    request.release()
    assert cache.evict(1) == 1
    assert found(cache, tokens) == 4 * 8191
    assert cache.evict(9000) == 8191
    assert cache.num_nodes == 0
    assert [stats.num_free for stats in cache.stats()] == [9000] * len(groups)
    cache.check_integrity()


def test_others_match_split_lock_and_evict_in_between():
    cache = PagedPrefixCache(4, 9000, (PageGroup(), WINDOW))
    request, tokens = start(cache, 100)
    held = []
    for number in range(1, 80):
        decode(cache, request, tokens, 101)
        middle = 4 * (number * 97 % (len(tokens) // 4))
        other = cache.acquire([*tokens[:middle], 10**9], reserve_last_token=False)
        assert other.num_tokens == middle
        assert other.pages().tolist() == request.pages().tolist()[: middle // 4]
        other.extend(5)
        other.insert([*tokens[:middle], *[10**9] * 5])
        held.append(other)
        if number % 3 == 0:
            held.pop(0).release()
            cache.evict(1)
        cache.check_integrity()
        assert found(cache, tokens) == len(tokens)
    assert cache.num_nodes <= 3 * 80
    for other in held:
        other.release()
    assert cache.evict(9000) > 0
    assert found(cache, tokens) == len(tokens)
    request.release()
    cache.check_integrity()
    cache.evict(9000)
    assert cache.num_nodes == 0


def test_an_edge_that_another_request_needs_does_not_grow():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 3)
    other = cache.acquire(tokens, reserve_last_token=False)
    decode(cache, request, tokens, 3)
    assert cache.num_nodes == 2
    assert other.pages().tolist() == request.pages().tolist()[:3]
    request.release()
    assert cache.evict(20) == 3
    assert found(cache, tokens) == 12
    cache.check_integrity()
    assert other.insert(tokens[:12]) == 0


def test_an_edge_grows_again_once_its_other_requests_ended():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 3)
    other = cache.acquire(tokens, reserve_last_token=False)
    other.release()
    decode(cache, request, tokens, 3)
    assert cache.num_nodes == 1
    request.release()
    # The next turn of a conversation goes on where the last one ended.
    request = cache.acquire(tokens, reserve_last_token=False)
    decode(cache, request, tokens, 3)
    assert cache.num_nodes == 1
    cache.check_integrity()


def test_an_edge_that_a_copy_reads_does_not_grow():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 3)
    other = cache.acquire([*tokens[:2], 99])
    (copy,) = other.prepare_copy()
    decode(cache, request, tokens, 1)
    assert cache.num_nodes == 2
    assert copy.source_page == request.pages()[0]
    assert other.complete_copy() == 2
    request.release()
    assert cache.evict(20) == 4
    cache.check_integrity()


def test_an_edge_with_a_child_does_not_grow():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 3)
    other = cache.acquire(tokens, reserve_last_token=False)
    other.extend(4)
    other.insert([*tokens, 9, 9, 9, 9])
    other.release()
    decode(cache, request, tokens, 2)
    assert cache.num_nodes == 3
    assert found(cache, [*tokens[:12], 9, 9, 9, 9]) == 16
    cache.check_integrity()


def test_an_edge_that_was_cut_grows_at_its_lower_part():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 4)
    other = cache.acquire(tokens[:8], reserve_last_token=False)
    decode(cache, request, tokens, 4)
    assert cache.num_nodes == 2
    assert other.pages().tolist() == request.pages().tolist()[:2]
    assert found(cache, tokens) == 32
    cache.check_integrity()


def test_an_edge_that_lost_its_end_grows_from_there():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 10)
    request.release()
    assert cache.evict(3) == 3
    request = cache.acquire(tokens, reserve_last_token=False)
    assert request.num_tokens == 28
    del tokens[28:]
    decode(cache, request, tokens, 5)
    assert cache.num_nodes == 1
    assert found(cache, tokens) == 48
    cache.check_integrity()


def test_a_decode_does_not_write_into_the_lists_that_others_got():
    cache = PagedPrefixCache(4, 20)
    request, tokens = start(cache, 5)
    other = cache.acquire(tokens, reserve_last_token=False)
    match = cache.match(tokens, reserve_last_token=False)
    table = other.pages().tolist()
    other.extend(8)
    grown = other.pages().tolist()
    other.release()
    decode(cache, request, tokens, 5)
    assert match.pages[0].tolist() == table == request.pages().tolist()[:5]
    assert grown[:5] == table


def test_a_decode_in_a_tight_window_makes_few_edges_and_each_can_be_matched():
    """An edge with gaps does not grow, so a leaf that goes whole has no more pages than the window group."""
    cache = PagedPrefixCache(4, 400, (PageGroup(), PageGroup(window_tokens=9, num_pages=20)))
    request, tokens = start(cache, 1)
    for _ in range(300):
        decode(cache, request, tokens, 1, trims=True)
        cache.check_integrity()
        assert found(cache, tokens) == len(tokens)
    assert 300 // 20 <= cache.num_nodes <= 2 * 300 // 20
    request.release()
    assert cache.evict(1) <= 20
    cache.check_integrity()
    assert found(cache, tokens) >= len(tokens) - 20 * 4


def test_pages_without_a_window_are_not_joined_with_those_that_have_one():
    cache = PagedPrefixCache(4, 40, (PageGroup(), WINDOW))
    request, tokens = start(cache, 4)
    request.extend(24)
    tokens += list(range(100, 124))
    request.trim_windows(40)
    assert request.insert(tokens, 28) == 3
    assert cache.num_nodes == 2
    request.release()
    cache.check_integrity()
    assert found(cache, tokens) == 16
    assert cache.num_nodes == 1


def test_a_decode_that_finds_no_room_leaves_its_edge_as_it_was():
    cache = PagedPrefixCache(4, 10)
    request, tokens = start(cache, 10)
    with pytest.raises(PoolExhausted):
        request.extend(1)
    cache.check_integrity()
    assert (cache.num_nodes, found(cache, tokens)) == (1, 40)
