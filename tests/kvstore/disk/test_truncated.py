"""A slot file that was cut while the store has it open: blocks behind the cut are misses, and are stored again."""

import json
import os

import pytest

from kvstore.disk.folder import LABEL, sized_files
from kvstore.disk.records import PAGE_BYTES, unpack_index

NUM_BLOCKS = 12

#: What is cut off is the end of the chain.
pytestmark = pytest.mark.usefixtures("in_one_turn")


@pytest.mark.parametrize(("num_whole", "more_bytes"), [(0, 0), (3, 0), (3, 100), (3, PAGE_BYTES + 100)])
def test_blocks_behind_the_cut_are_misses_once_and_are_stored_again(
    cluster, tmp_path, wait_until, num_whole, more_bytes
):
    settings = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}
    cluster.add("a", **settings)
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    before = [worker.block(at) for at in range(NUM_BLOCKS)]
    worker.save(hashes, range(NUM_BLOCKS))
    wait_until(lambda: cluster.nodes["a"].state.disk.stats().get("num_written", 0) == NUM_BLOCKS)
    cluster.stop_node("a")
    cluster.add("a", **settings)
    reader, disk = cluster.worker("a", seed=1), cluster.nodes["a"].state.disk
    wait_until(lambda: disk.num_restored == NUM_BLOCKS)
    slots, index = sized_files(tmp_path / "kv" / "default-0", 4096)
    label = json.loads((slots.parent / LABEL).read_text())
    records = unpack_index(bytes.fromhex(label["tier_id"]), index.read_bytes())
    # Several threads write, so the places of a chain are in any order.
    whole = {record.block_hash for record in records if record.place < num_whole}
    kept = next(at for at in range(NUM_BLOCKS) if hashes.hash_at(at) not in whole)
    os.truncate(slots, num_whole * (slots.stat().st_size // disk.pool.num_slots) + more_bytes)
    result = reader.load(hashes, range(NUM_BLOCKS))
    assert result.num_blocks == kept, result
    wait_until(lambda: disk.pool.lookup(hashes) == kept)
    assert not disk.is_off
    assert disk.stats()["num_trips"] == 0
    # They are computed, saved and written again.
    saver = cluster.worker("a")
    assert [saver.block(at) for at in range(NUM_BLOCKS)] == before
    assert saver.save(hashes, range(NUM_BLOCKS)).num_blocks == NUM_BLOCKS
    wait_until(lambda: disk.pool.lookup(hashes) == NUM_BLOCKS)
    disk.pool.check_integrity()
