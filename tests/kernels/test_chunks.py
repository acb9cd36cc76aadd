"""What a staging ring would move, worked out for whole copies at once, beside the same position by position."""

import numpy as np
import pytest

from kvstore.kernels.chunks import Moves, cut_spans, partial_positions
from kvstore.kernels.spans import Paging, block_spans

PAGING = Paging(engine_block_size=4, stored_block_size=8, num_blocks=80)
BLOCK_BYTES = 1000


def drawn(seed):
    """A run of up to 40 positions, some of which are not to be touched."""
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.integers(0, 300))
    count = -(-num_tokens // 8)
    positions = np.where(rng.random(count) < 0.2, -1, np.arange(count))
    blocks = rng.permutation(80)[: -(-num_tokens // 4)]
    skip = int(rng.integers(0, num_tokens + 1)) if rng.random() < 0.5 else 0
    spans = block_spans(PAGING, blocks, positions, count, num_tokens=num_tokens, skip_prefix_tokens=skip)
    slots = np.arange(count) + 7 if rng.random() < 0.5 else rng.permutation(50)[:count]
    return rng, spans, slots.astype(np.int64)


@pytest.mark.parametrize("seed", range(60))
def test_every_span_is_in_one_chunk_and_fits_its_buffer(seed):
    rng, spans, slots = drawn(seed)
    per_chunk, partial = int(rng.integers(1, 9)), partial_positions(spans, len(slots))
    chunks = cut_spans(spans, per_chunk, partial, 2, 3)
    assert [at for chunk in chunks for at in range(chunk.begin, chunk.end)] == list(range(len(spans)))
    turn = 2
    for chunk in chunks:
        held = spans.rows[chunk.begin : chunk.end, 1]
        whole = np.bincount(spans.rows[:, 1], weights=spans.rows[:, 4], minlength=len(slots))[held] == 8
        assert ((held >= chunk.first) & (held < chunk.first + per_chunk)).all()
        assert chunk.partial == (not whole.all())
        if chunk.partial:
            assert set(held.tolist()) == {chunk.first}
        else:
            assert chunk.buffer == turn % 3
            turn += 1


@pytest.mark.parametrize("runs", [[(0, 1000)], [(100, 300)], [(0, 200), (600, 200)], [(300, 100), (0, 300)]])
@pytest.mark.parametrize("seed", range(30))
def test_moves_are_those_of_each_position(seed, runs):
    rng, spans, slots = drawn(seed)
    host, moves = 10**6 + slots * 1000, Moves(spans, 10**6 + slots * 1000, BLOCK_BYTES, runs)
    for chunk in cut_spans(spans, int(rng.integers(1, 9)), partial_positions(spans, len(slots)), 0, 3):
        runs_at = list(zip(*(column.tolist() for column in moves.of(chunk, 5000)), strict=True))
        got = {(host + byte, device + byte) for host, device, length in runs_at for byte in range(0, length, 100)}
        want = {
            (int(host[position]) + byte, 5000 + (position - chunk.first) * BLOCK_BYTES + byte)
            for position in set(spans.rows[chunk.begin : chunk.end, 1].tolist())
            for offset, length in runs
            for byte in range(offset, offset + length, 100)
        }
        assert got == want
        assert sum(length for _, _, length in runs_at) == 100 * len(want)


def test_adjoining_blocks_are_one_move():
    spans = block_spans(PAGING, range(12), range(6), 6)
    moves = Moves(spans, np.array([0, 1000, 2000, 7000, 8000, 5000]), 1000, [(0, 1000)])
    [chunk] = cut_spans(spans, 6, None, 0, 2)
    assert moves.of(chunk, 10_000)[2].tolist() == [3000, 2000, 1000]
    in_pieces = Moves(spans, np.arange(6) * 1000, 1000, [(0, 1000)], pieces=np.array([0, 0, 0, 0, 1, 1]))
    assert in_pieces.of(chunk, 10_000)[2].tolist() == [4000, 2000]


def test_nothing_to_copy_is_no_chunk():
    assert cut_spans(block_spans(PAGING, [], [], 0), 4, None, 0, 2) == []
