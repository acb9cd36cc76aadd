"""What gpu_scatter.py lists: as many bytes as the limit copies, each piece once, and all of them in the memory."""

import numpy as np

from benchmarks.studies.gpu_scatter import (
    L2_BYTES,
    L2_PAGES,
    L2_PASSES,
    MEMORY_BYTES,
    NUM_BYTES,
    PAGE_BYTES,
    PIECE_BYTES,
    l2_offsets,
    patterns,
)


def test_every_pattern_has_every_piece_once():
    for name, size, offsets in patterns(np.random.default_rng(1)):
        assert len(np.unique(offsets)) == len(offsets) == NUM_BYTES // PIECE_BYTES, (name, size)
        assert offsets.min() >= 0
        assert offsets.max() + PIECE_BYTES <= MEMORY_BYTES
        assert not (offsets % PIECE_BYTES).any()
        if name == "within":
            assert ((offsets // size)[1:] >= (offsets // size)[:-1]).all(), "windows one after another"
        if name == "pieces":
            begins = offsets[:: size // PIECE_BYTES]
            assert not (begins % size).any()
            assert (np.diff(begins) < 0).any()
        if name == "one_of":
            assert (np.diff(offsets) > 0).all()
            assert offsets.max() > NUM_BYTES * (size - 0.1)


def test_what_is_read_from_the_l2_is_as_much_from_any_number_of_pages():
    for pages in L2_PAGES:
        offsets = l2_offsets(pages, np.random.default_rng(2))
        assert len(np.unique(offsets)) * PIECE_BYTES == L2_BYTES
        assert len(offsets) == L2_PASSES * L2_BYTES // PIECE_BYTES
        assert len(np.unique(offsets // PAGE_BYTES)) == pages
        assert offsets.max() + PIECE_BYTES <= MEMORY_BYTES
