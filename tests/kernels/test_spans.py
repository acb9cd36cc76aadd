import numpy as np
import pytest
import torch

from kvstore.kernels.reference_tokens import flat_tokens, token_pairs
from kvstore.kernels.spans import Paging, block_spans, position_spans, token_spans

PAGING = Paging(engine_block_size=4, stored_block_size=8, num_blocks=10)


def pairs_of(spans):
    """Every token of a list, as the oracle names it."""
    size = spans.paging.engine_block_size
    return [
        (block * size + at + step, slot, stored + step)
        for block, slot, at, stored, count in spans.rows.tolist()
        for step in range(count)
    ]


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (1, 6), (12, 3)])
def test_every_length_and_skip_of_a_run(sizes):
    engine, stored = sizes
    paging = Paging(engine_block_size=engine, stored_block_size=stored, num_blocks=40)
    rng = np.random.default_rng(engine)
    for num_tokens in range(25):
        blocks = rng.permutation(40)[: -(-num_tokens // engine)]
        slots = rng.permutation(9)[: -(-num_tokens // stored)]
        slots[rng.random(len(slots)) < 0.2] = -1
        for skip in range(num_tokens + 1):
            spans = block_spans(paging, blocks, slots, 9, num_tokens=num_tokens, skip_prefix_tokens=skip)
            places = flat_tokens(blocks.tolist(), engine)
            assert pairs_of(spans) == token_pairs(places, slots.tolist(), stored, num_tokens, skip)
            assert (spans.rows[:, 4] >= 1).all()
            assert (spans.rows[:, 2] + spans.rows[:, 4] <= engine).all()
            assert (spans.rows[:, 3] + spans.rows[:, 4] <= stored).all()
            by_token = token_spans(paging, places, slots, 9, num_tokens=num_tokens, skip_prefix_tokens=skip)
            assert pairs_of(by_token) == pairs_of(spans)


def test_adjacent_tokens_are_one_span():
    spans = token_spans(PAGING, list(range(4, 12)), [3], 5)
    assert spans.rows.tolist() == [[1, 3, 0, 0, 4], [2, 3, 0, 4, 4]]


def test_negative_places_are_in_no_span():
    spans = token_spans(PAGING, [-1, 0, 1, -3, -2, 7, -1, -1, 9], [4, 1], 5)
    assert pairs_of(spans) == [(0, 4, 1), (1, 4, 2), (7, 4, 5), (9, 1, 0)]


def test_what_is_past_the_run_in_a_mapping_is_not_looked_at():
    assert len(token_spans(PAGING, [0, 1, 999], [0], 1, num_tokens=2)) == 1


def test_torch_ids_and_lists_and_small_integers():
    wanted = block_spans(PAGING, [2, 0], [1], 5).rows.tolist()
    for ids in (torch.tensor([2, 0]), np.array([2, 0], np.int32), np.array([2, 0], np.uint64), (2, 0)):
        assert block_spans(PAGING, ids, [1], 5).rows.tolist() == wanted


def test_near_blocks_are_unpacked_in_their_order():
    spans = block_spans(PAGING, [7, 2, 9, 0, 4], [1, 3, 0], 5, num_tokens=19, skip_prefix_tokens=3)
    ordered = spans.to_unpack()
    assert ordered.rows[:, 0].tolist() == [0, 2, 4, 7, 9]
    assert sorted(pairs_of(ordered)) == sorted(pairs_of(spans))
    assert spans.rows[0, 0] == 7
    assert ordered.rows.flags.c_contiguous  # The kernel reads it.


def test_blocks_far_apart_are_unpacked_as_the_slots_lie():
    paging = Paging(engine_block_size=4, stored_block_size=4, num_blocks=80)
    for last, wanted in ((16, [0, 16]), (17, [17, 0])):
        assert block_spans(paging, [last, 0], [1, 0], 2).to_unpack().rows[:, 0].tolist() == wanted
    assert len(block_spans(paging, [], [], 2).to_unpack()) == 0


def test_nothing_is_changed():
    blocks, slots = np.array([2, -1]), np.array([1])
    block_spans(PAGING, blocks, slots, 5, skip_prefix_tokens=3)
    assert (blocks.tolist(), slots.tolist()) == ([2, -1], [1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_spans(PAGING, [0, 10], [0], 5), r"block_ids: wanted ids below 10, got 10 at position 1"),
        (lambda: block_spans(PAGING, [0, 1], [5], 5), r"slot_ids: wanted ids below 5, got 5"),
        (lambda: block_spans(PAGING, [1, 1], [0], 5), r"block_ids: wanted every id once, got 1"),
        (lambda: block_spans(PAGING, [1, 2, 3, 4], [0, 0], 5), r"slot_ids: wanted every id once, got 0"),
        (lambda: block_spans(PAGING, [1.0, 2.0], [0], 5), "wanted a flat list of integers"),
        (lambda: block_spans(PAGING, [[1, 2]], [0], 5), "wanted a flat list of integers"),
        (lambda: block_spans(PAGING, np.array([2**63, 1], np.uint64), [0], 5), "wanted ids below 10"),
        (lambda: block_spans(PAGING, [1], [0], 5), "1 blocks of 4 tokens and 1 slots of 8"),
        (lambda: block_spans(PAGING, [1, 2], [0], 5, num_tokens=9), "block_ids: wanted 3 for 9 tokens"),
        (lambda: block_spans(PAGING, [1, 2], [0, 1], 5, num_tokens=8), "slot_ids: wanted 1 for 8 tokens"),
        (lambda: block_spans(PAGING, [1, 2], [0], 5, skip_prefix_tokens=9), "skip_prefix_tokens in"),
        (lambda: block_spans(PAGING, [1, 2], [0], 5, skip_prefix_tokens=-1), "skip_prefix_tokens in"),
        (lambda: block_spans(PAGING, [], [], 5, num_tokens=-1), "num_tokens >= 0"),
        (lambda: token_spans(PAGING, [0, 1], [0], 5, num_tokens=3), "wanted a slot for each of 3 tokens, got 2"),
        (lambda: token_spans(PAGING, [0, 40], [0], 5), "slot_mapping: wanted ids below 40, got 40"),
        (lambda: token_spans(PAGING, [7, 7], [0], 5), "slot_mapping: wanted every id once, got 7"),
        (lambda: Paging(engine_block_size=6, stored_block_size=4, num_blocks=1), "got 6 and 4 tokens"),
        (lambda: Paging(engine_block_size=0, stored_block_size=4, num_blocks=1), ">= 1"),
        (lambda: block_spans(PAGING, torch.empty(2, dtype=torch.int64, device="meta"), [0], 5), "host memory"),
    ],
)
def test_bad_input_is_refused(call, message):
    """Scenario 16: an id that comes twice is refused as well, because the copies of a launch have no order."""
    with pytest.raises(ValueError, match=message):
        call()


def test_spans_of_positions_are_those_of_whole_blocks():
    paging = Paging(engine_block_size=16, stored_block_size=16, num_blocks=64)
    ids = np.random.default_rng(0).permutation(64)[:20]
    got, wanted = position_spans(paging, ids), block_spans(paging, ids, np.arange(20), 20)
    assert np.array_equal(got.rows, wanted.rows)
    assert (got.paging, got.num_slots, got.num_tokens) == (paging, 20, 320)
    assert len(position_spans(paging, ids[:0])) == 0
    for bad in ([-1, 2], [3, 64]):
        with pytest.raises(ValueError, match="block_ids"):
            position_spans(paging, np.array(bad))
    with pytest.raises(ValueError, match="block_spans"):
        position_spans(Paging(engine_block_size=8, stored_block_size=16, num_blocks=64), ids)
