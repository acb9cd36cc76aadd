"""What gpu_strips.py compares: every style that the product chooses for its cases is among those that it measures."""

import numpy as np
import pytest

from benchmarks.studies.gpu_strips import CASES, STYLES, chosen_style, shares, words_of
from kvstore.bench.gpu import SHAPES, make_shape
from kvstore.kernels.spans import Paging, block_spans


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_what_the_product_chooses_is_one_of_the_styles(name, case):
    block_size, num_blocks, half = case
    shape = make_shape(name, block_size)
    paging = Paging(engine_block_size=block_size, stored_block_size=block_size, num_blocks=2 * half)
    for seed in range(20):
        ids = np.random.default_rng(seed).permutation(2 * half)[:num_blocks]
        spans = block_spans(paging, ids, range(num_blocks), num_blocks).to_unpack()
        chosen = chosen_style(shape, spans)
        assert [style for style in STYLES.values() if style == chosen] == [chosen]
        assert (chosen.strip is None) == (num_blocks < half), "few blocks of many are taken slot after slot"


def test_words_are_those_of_a_plane_of_a_block():
    assert words_of(make_shape("8B", 16)) == 16 * 8 * 128 * 2 // 16
    assert words_of(make_shape("MLA", 64)) == 64 * 576 * 2 // 16


def test_shares_are_ratios_within_a_place_and_the_worst_place_is_the_least():
    places = [
        {"limit": [1.0, 1.0, 9.0], "one": [2.0, 2.0, 2.0], "two": [1.0]},
        {"limit": [3.0], "one": [4.0], "two": [3.0]},
        {"limit": [1.0], "one": [4.0], "two": [1.25]},
    ]
    assert shares(places) == {"one": (0.5, 0.25), "two": (1.0, 0.8)}
