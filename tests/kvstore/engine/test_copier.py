"""Where the tokens of a job lie in an engine whose blocks are larger, smaller or alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.copier import engine_pages, job_spans, position_job_spans
from kvstore.engine.layout import CacheForm, EngineLayout
from kvstore.errors import InvalidRequest
from kvstore.kernels.spans import Paging

NUM_BLOCKS, NUM_SLOTS = 40, 30


def layout(block_size, num_blocks=NUM_BLOCKS):
    return EngineLayout(
        form=CacheForm.PER_LAYER,
        axes="BTHD",
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        tensor_shape=(num_blocks, block_size, 1, 1),
        stride_bytes=(block_size, 1, 1, 1),
        dtype="uint8",
        device="cpu",
    )


@st.composite
def jobs(draw):
    """A job of `count` stored blocks from block `start` of its chain on, and what of it is copied."""
    stored, engine = draw(st.sampled_from([(4, 4), (4, 8), (4, 16), (8, 2), (6, 3), (4, 1), (1, 4)]))
    start, count = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    needed = -(-(start * stored % engine + count * stored) // engine) if count else 0
    ids = draw(st.permutations(range(NUM_BLOCKS)))[:needed]
    indexes = sorted(draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count)))
    slots = draw(st.permutations(range(NUM_SLOTS)))[: len(indexes)]
    return stored, engine, start, count, ids, indexes, slots, draw(st.integers(0, count * stored + 3))


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_every_token_is_where_the_chain_says(job):
    stored, engine, start, count, ids, indexes, slots, skip = job
    pages = engine_pages(ids, layout(engine), stored, start, count)
    paging = Paging(engine_block_size=engine, stored_block_size=stored, num_blocks=NUM_BLOCKS)
    spans = job_spans(paging, pages, np.array(indexes, np.int64), np.array(slots, np.int64), NUM_SLOTS, skip)
    copied = sorted(
        (block, at + token, slot, begin + token)
        for block, slot, at, begin, num_tokens in spans.rows.tolist()
        for token in range(num_tokens)
    )
    # An engine lays its chains from the begin of a block on: what comes before the job fills the first one.
    before = start * stored % engine
    wanted = []
    for index, slot in zip(indexes, slots, strict=True):
        for token in range(stored):
            place = before + index * stored + token
            if index * stored + token >= skip:
                wanted.append((ids[place // engine], place % engine, slot, token))
    assert copied == sorted(wanted)
    for index in range(count):
        places = range(before + index * stored, before + (index + 1) * stored)
        assert list(pages.of_block(index)) == list(dict.fromkeys(ids[place // engine] for place in places))


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_positions_in_place_of_slots_are_the_same_tokens(job):
    stored, engine, start, count, ids, indexes, _, skip = job
    pages, positions = engine_pages(ids, layout(engine), stored, start, count), np.arange(len(indexes))
    paging = Paging(engine_block_size=engine, stored_block_size=stored, num_blocks=NUM_BLOCKS)
    spans = position_job_spans(paging, pages, np.array(indexes, np.int64), skip)
    want = job_spans(paging, pages, np.array(indexes, np.int64), positions, len(indexes), skip)
    assert (spans.rows.tolist(), spans.num_slots) == (want.rows.tolist(), want.num_slots)


@pytest.mark.parametrize(
    ("engine", "start", "count", "wanted"),
    [(4, 3, 5, 5), (8, 0, 4, 2), (8, 0, 5, 3), (8, 1, 4, 3), (16, 3, 6, 3), (2, 3, 5, 10), (8, 1, 0, 0)],
)
def test_as_many_ids_as_engine_blocks_hold_the_job(engine, start, count, wanted):
    assert len(engine_pages(range(wanted), layout(engine), 4, start, count).ids) == wanted
    for other in {max(0, wanted - 1), wanted + 1} - {wanted}:
        with pytest.raises(InvalidRequest, match=f"wanted {wanted} engine blocks, .* every block of {engine} tokens"):
            engine_pages(range(other), layout(engine), 4, start, count)
