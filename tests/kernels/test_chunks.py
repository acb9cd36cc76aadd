"""What a staging ring would move, worked out for whole copies at once, beside the same position by position."""

import numpy as np
import pytest

from kvstore.kernels import chunks as chunks_module
from kvstore.kernels.chunks import Memory, by_slot, cut_spans, list_moves, partial_positions
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


@pytest.mark.parametrize("seed", range(40))
def test_the_ends_of_a_copy_are_short_chunks(seed):
    """So that the kernel that fills the first one, or empties the last one, keeps the copy engines for less long."""
    rng, spans, _ = drawn(seed)
    per_chunk, most = int(rng.integers(2, 9)), int(rng.integers(1, 3))
    held = spans.rows[:, 1]
    for ends in ({"most_first": most}, {"most_last": most}):
        chunks = cut_spans(spans, per_chunk, None, 0, 3, **ends)
        assert [at for chunk in chunks for at in range(chunk.begin, chunk.end)] == list(range(len(spans)))
        assert all(len(set(held[chunk.begin : chunk.end].tolist())) <= per_chunk for chunk in chunks)
        assert all(((held >= c.first) & (held < c.first + per_chunk))[c.begin : c.end].all() for c in chunks)
        if chunks:
            end = chunks[0] if "most_first" in ends else chunks[-1]
            assert len(set(held[end.begin : end.end].tolist())) <= most
        fewest = -(-len(set(held.tolist())) // per_chunk)
        assert len(chunks) <= -(-(int(held.max()) + 1 - int(held.min())) // per_chunk) + 1 if len(held) else not chunks
        assert len(chunks) >= fewest


@pytest.mark.parametrize("seed", range(40))
def test_by_slot_is_the_same_copy_in_the_order_of_the_slots(seed):
    _, spans, slots = drawn(seed)
    renamed, sorted_slots = by_slot(spans, slots)
    assert sorted_slots.tolist() == sorted(slots.tolist())
    positions = renamed.rows[:, 1]
    assert (positions[1:] >= positions[:-1]).all()

    def copied(spans, slots):
        return sorted((row[0], int(slots[row[1]]), *row[2:]) for row in spans.rows.tolist())

    assert copied(renamed, sorted_slots) == copied(spans, slots)
    assert renamed.rows.flags.c_contiguous  # The kernel reads it.


@pytest.fixture(params=[0, 1 << 30], ids=["many", "few"])
def _both_lists(request, monkeypatch):
    """Few runs are listed one by one, many all at once."""
    monkeypatch.setattr(chunks_module, "_FEW_RUNS", request.param)


@pytest.mark.usefixtures("_both_lists")
@pytest.mark.parametrize("runs", [[(0, 1000)], [(100, 300)], [(0, 200), (600, 200)], [(300, 100), (0, 300)]])
@pytest.mark.parametrize("seed", range(30))
def test_moves_are_those_of_each_position(seed, runs):
    rng, spans, slots = drawn(seed)
    host, buffers = 10**6 + slots * 1000, [5000, 70_000, 90_000]
    chunks = cut_spans(spans, int(rng.integers(1, 9)), partial_positions(spans, len(slots)), 0, 3)
    moves = list_moves(spans, chunks, Memory(host, buffers, BLOCK_BYTES, runs))
    begin = 0
    for chunk, end in zip(chunks, moves.ends, strict=True):
        runs_at = [column[begin:end].tolist() for column in (moves.host, moves.device, moves.lengths)]
        got = {(h + byte, d + byte) for h, d, length in zip(*runs_at, strict=True) for byte in range(0, length, 100)}
        begin = end
        if chunk.partial:
            assert not got
            continue
        want = {
            (int(host[position]) + byte, buffers[chunk.buffer] + (position - chunk.first) * BLOCK_BYTES + byte)
            for position in set(spans.rows[chunk.begin : chunk.end, 1].tolist())
            for offset, length in runs
            for byte in range(offset, offset + length, 100)
        }
        assert got == want
        assert sum(runs_at[2]) == 100 * len(want)
    assert begin == len(moves.lengths)


@pytest.mark.usefixtures("_both_lists")
def test_adjoining_blocks_are_one_move():
    spans = block_spans(PAGING, range(12), range(6), 6)
    [chunk] = cut_spans(spans, 6, None, 0, 2)
    slots = np.array([0, 1000, 2000, 7000, 8000, 5000])
    memory = Memory(slots, [10_000], 1000, [(0, 1000)])
    assert list_moves(spans, [chunk], memory).lengths.tolist() == [3000, 2000, 1000]
    pieces = np.array([0, 0, 0, 0, 1, 1])
    in_pieces = list_moves(spans, [chunk], memory._replace(slots=np.arange(6) * 1000, pieces=pieces))
    assert in_pieces.lengths.tolist() == [4000, 2000]


@pytest.mark.usefixtures("_both_lists")
def test_buffers_side_by_side_are_no_one_move():
    """Each chunk is copied by itself, after its own kernel."""
    spans = block_spans(PAGING, range(12), range(6), 6)
    chunks = cut_spans(spans, 3, None, 0, 2)
    moves = list_moves(spans, chunks, Memory(np.arange(6) * 1000, [0, 3000], 1000, [(0, 1000)]))
    assert (moves.lengths.tolist(), moves.ends) == ([3000, 3000], [1, 2])


def test_nothing_to_copy_is_no_chunk():
    spans = block_spans(PAGING, [], [], 0)
    assert cut_spans(spans, 4, None, 0, 2) == []
    assert list_moves(spans, [], Memory(np.empty(0, np.int64), [0], 1000, [(0, 1000)])).ends == []
