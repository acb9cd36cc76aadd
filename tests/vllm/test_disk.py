"""Answers from a disk tier, after the store and the engine were started anew."""

from __future__ import annotations

import pytest
from asking import cached, full, one_by_one

import kvstore


@pytest.fixture
def start_store(cluster, unit, tmp_path):
    """Starts a store on the same folder again and again."""
    running = []

    def start():
        for store in running:
            store.stop()
        running[:] = [
            kvstore.start(
                "64MiB", name="on-disk", block_bytes=2 * unit * 4096, lease_ttl_s=10.0,
                disk_path=str(tmp_path / "kv"), disk_capacity_bytes=256 << 20,
            )
        ]  # fmt: skip
        return running[0]

    yield start
    for store in running:
        store.stop()


def test_a_prompt_is_served_from_disk_after_a_restart_of_store_and_engine(
    start_store, start_engine, model, connector, plain, prompt_of, unit, same, eventually
):
    prompts = [(f"disk {count}", prompt_of(count, 900 + count), {}) for count in (unit, 3 * unit + 1, 700)]
    wanted = [plain.run([prompt], cold=True)[0] for prompt in prompts]
    num_blocks = sum(full(prompts, unit)) // unit
    store = start_store()

    def on_disk(key):
        return sum((node["disk"] or {}).get(key, 0) for node in store.stats()["nodes"].values())

    def start():
        return start_engine(
            model, block_size=unit, connector=connector(0, store="on-disk", portable=True)
        ).wait_started()

    engine = start()
    same(one_by_one(engine, prompts), wanted)
    engine.await_saves()
    eventually(lambda: on_disk("num_written") >= num_blocks, 60.0)
    engine.stop()

    store = start_store()
    engine = start()
    eventually(lambda: on_disk("num_restored") >= num_blocks, 60.0)
    answers = one_by_one(engine, prompts)
    same(answers, wanted)
    assert cached(answers) == full(prompts, unit)
    assert on_disk("num_read") >= num_blocks
    assert on_disk("num_damaged") == 0
