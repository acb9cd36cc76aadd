"""A trace replayed with real stores: every tier hits what the simulator says, and every byte is compared."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore import cli
from kvstore.actors.bench.replay_worker import ReplayWorker, bytes_of, space_of, wrong_byte
from kvstore.blocks.hashing import BlockHashes
from kvstore.client.results import LoadResult
from kvstore.errors import KVStoreError

BLOCK_BYTES = 8192


def run(*words, **settings):
    return CliRunner().invoke(cli.main, [str(word) for word in words], prog_name="kvstore", **settings)


def run_alone(*words):
    """Run the command in a process of its own: this one may be the driver of another Ray."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    command = [sys.executable, "-c", "from kvstore.cli import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """60 prompts: new ones, and longer ones of the same beginning."""
    draw, prompts, lines, count = random.Random(5), [], [], 1000
    for second in range(60):
        if not prompts or draw.random() < 0.35:
            prompts.append([0] if draw.random() < 0.7 else [])
        prompt = draw.choice(prompts)
        more = draw.randint(1, 5)
        prompt += range(count, count + more)
        count += more
        row = {"timestamp": 1000 * second, "input_length": 512 * len(prompt), "output_length": 5, "hash_ids": prompt}
        lines.append(json.dumps(row))
    path = tmp_path_factory.mktemp("traces") / "made.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_real_and_simulated_hits_are_equal_also_after_a_restart(trace, tmp_path):
    words = ("--blocks", 45, "--disk-blocks", 300, "--block-bytes", BLOCK_BYTES, "--restart-at", 30, "--wait-written")
    result = run_alone("replay", trace, "--mode", "real", "--json", "--disk-path", tmp_path / "disk", *words)
    assert result.returncode == 0, result.stderr[-4000:]
    real, same = json.loads(result.stdout)
    assert (real["mode"], same["mode"]) == ("real", "simulate")
    # Columns of time, and of bytes that were moved, are of one of them alone.
    both = real.keys() & same.keys() - {"mode"}
    assert {name: real[name] for name in both} == {name: same[name] for name in both}
    assert {"num_hits_memory", "num_hits_disk_after_restart", "num_evictions", "num_disk_written"} <= both
    assert min(real["num_hits_memory"], real["num_hits_peer"], real["num_hits_disk_after_restart"]) > 0
    assert real["num_verified"] == real["num_hits"]
    assert (real["num_wrong_bytes"], real["num_damaged"], real["failed"], real["dropped"]) == (0, 0, {}, {})
    assert real["memory_bytes"] == BLOCK_BYTES * real["num_hits_memory"]
    assert real["disk_bytes"] == BLOCK_BYTES * real["num_hits_disk"]
    assert real["peer_bytes"] == BLOCK_BYTES * real["num_hits_peer"]
    # On disk a block has a page more.
    assert real["disk_written_bytes"] == (BLOCK_BYTES + 4096) * real["num_disk_written"]
    assert real["written_per_read_byte"] == pytest.approx(real["num_disk_written"] / real["num_disk_read"], abs=1e-3)
    assert 0 < real["load_p50_s"] <= real["load_p99_s"]
    assert len(list((tmp_path / "disk").iterdir())) == 2, "a folder that was named stays"


def test_the_bytes_of_a_block_follow_from_its_name():
    one, other = bytes([1] * 32), bytes([2] * 32)
    assert np.array_equal(bytes_of(one, BLOCK_BYTES), bytes_of(one, BLOCK_BYTES))
    assert not np.array_equal(bytes_of(one, BLOCK_BYTES), bytes_of(other, BLOCK_BYTES))
    assert space_of(5 * 4096).shape.block_bytes == 5 * 4096


def test_a_wrong_byte_is_named():
    wanted = np.arange(8, dtype=np.uint8)
    got = wanted.copy()
    assert wrong_byte(got, wanted) == ""
    got[[3, 5]] ^= 0xF0
    assert wrong_byte(got, wanted) == "wanted 0x03 at byte 3, got 0xf3, and 2 wrong bytes in all"


class Done:
    def __init__(self, value):
        self.result = lambda timeout_s: value


class FakeClient:
    """Delivers two blocks, with one wrong byte in the second."""

    def __init__(self, worker):
        self._worker, self.saved = worker, []

    def load(self, hashes, ids):
        for at in ids[:2]:
            self._worker.rows[at] = bytes_of(hashes[at], BLOCK_BYTES)
        self._worker.rows[1, 77] ^= 1
        return Done(LoadResult(num_blocks=2, num_local=2))


def test_a_wrong_byte_ends_the_replay_with_row_block_and_node():
    worker, digest = ReplayWorker(BLOCK_BYTES, 3), space_of(BLOCK_BYTES).digest
    worker.client = FakeClient(worker)
    hashes = BlockHashes(digest, digest, 0, bytes(range(96)))
    with pytest.raises(KVStoreError, match=r"row 4, block 21 \(2021222324252627\), node 1: wanted 0x.. at byte 77"):
        worker.serve(4, 1, hashes, [20, 21, 22])


def test_an_error_of_a_real_replay_is_one_line_and_exit_status_2(trace):
    def broken(*args):
        raise KVStoreError("row 4, block 21, node 1: wanted 0x01 at byte 77, got 0x00")

    result = run("replay", trace, "--mode", "real", "--blocks", 50, obj=broken)
    assert (result.exit_code, result.stdout) == (2, "")
    *progress, error = result.stderr.splitlines()
    assert error == "KVStoreError: row 4, block 21, node 1: wanted 0x01 at byte 77, got 0x00"
    assert progress == [
        "lru, 50 blocks: 0 of 60 requests",
        "lru, 50 blocks: 60 of 60 requests",
        "starting a Ray of 2 node(s) for real stores",
    ]
