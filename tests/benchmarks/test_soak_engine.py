"""A wrong byte anywhere is seen: in blocks that are called usable, in those that must stay as they are, in leases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak import plan
from tests.soak.engine import LAYOUTS, MINE, POISON, Cache, stamp, stored_stamp
from tests.soak.weights import Weights

HASHES = plan.chains(plan.space())[0][:6]
IDS = [5, 0, 3, 7, 1, 2]


@pytest.fixture(params=LAYOUTS)
def cache(request):
    made = Cache(request.param, 8)
    made.write(HASHES, IDS)
    return made


def test_right_blocks_are_right(cache):
    assert cache.wrong_blocks(HASHES, IDS, len(IDS)) == []
    assert cache.holds_only([4, 6], POISON)


@pytest.mark.parametrize("at", [(0, 0, 0, 0, 0), (1, 1, 15, 3, 63), (0, 1, 7, 2, 31)])
@pytest.mark.parametrize("bit", [0, 15])
def test_one_wrong_bit_is_seen_in_what_is_usable_and_only_there(cache, at, bit):
    cache.bits[IDS[3]][at] ^= np.int16(-(2**15) if bit == 15 else 1 << bit)
    assert len(cache.wrong_blocks(HASHES, IDS, 4)) == 1
    assert cache.wrong_blocks(HASHES, IDS, 3) == []


def test_blocks_of_other_hashes_or_weights_are_wrong(cache):
    assert len(cache.wrong_blocks(HASHES, IDS[::-1], 6)) == 6
    assert len(cache.wrong_blocks(HASHES, IDS, 6, version=1)) == 6
    assert len({stamp(block_hash, version).tobytes() for block_hash in HASHES for version in range(4)}) == 24


@pytest.mark.parametrize("skip_tokens", [1, 16, 39, 96])
def test_a_byte_below_the_skip_is_seen(skip_tokens):
    cache = Cache(LAYOUTS[0], 8)
    last, token = divmod(skip_tokens - 1, plan.SHAPE.block_size)
    cache.write(HASHES, IDS)
    for i in range(last + 1):
        cache.bits[IDS[i]][:, :, : token + 1 if i == last else None] = POISON
    assert cache.wrong_blocks(HASHES, IDS, 6, skip_tokens) == []
    cache.bits[IDS[last]][1, 1, token, 0, 0] ^= 1
    assert len(cache.wrong_blocks(HASHES, IDS, 6, skip_tokens)) == 1


def test_a_touched_block_does_not_hold_what_it_was_filled_with(cache):
    cache.fill([1, 4], MINE)
    assert cache.holds_only([1, 4], MINE)
    cache.bits[4][1, 0, 3, 2, 1] += 1
    assert not cache.holds_only([1, 4], MINE)


def test_versions_of_weights_do_not_mix(cache):
    assert cache.version_of(HASHES, IDS, range(3)) == 0
    cache.write(HASHES, IDS, 2)
    assert cache.version_of(HASHES, IDS, range(3)) == 2
    assert cache.version_of(HASHES, IDS, range(2)) is None
    cache.write(HASHES[:1], IDS[:1], 1)
    assert cache.version_of(HASHES, IDS, range(3)) is None


def test_the_stored_order_is_head_layer_plane_token_dim():
    stored = np.frombuffer(stored_stamp(HASHES[0]), np.int16).reshape(plan.SHAPE.block_dims)
    assert np.array_equal(stored[0, 3, 1, 0, 5], stamp(HASHES[0])[1, 0, 5, 3])


def test_all_processes_see_which_weights_are_used(tmp_path):
    writer = Weights(tmp_path / "weights", writer=True)
    reader = Weights(tmp_path / "weights")
    assert (reader.oldest, reader.newest) == (0, 0)
    assert writer.changed() == 1
    assert (reader.oldest, reader.newest, reader.num_clearings) == (1, 1, 0)
    writer.cleared()
    assert (reader.oldest, reader.newest, reader.num_clearings) == (1, 1, 1)
