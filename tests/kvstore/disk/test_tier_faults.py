"""Saves, loads, clearings, damage, errors and slow calls, all at once; then everything has been given back."""

import errno
import random
import threading

import pytest
from disk_store import HALF, SOON_S, Store, wait_until

from kvstore.errors import KVStoreError

NUM_CHAINS, NUM_ROUNDS = 6, 150


def work(store, worker, seed, failed):
    """Save and load chains; each block that comes has to be what was saved under its name, by whomever."""
    rng = random.Random(seed)
    for _ in range(NUM_ROUNDS):
        number = rng.randrange(NUM_CHAINS)
        hashes, first = store.cluster.hashes(8, seed=number), 8 * number
        try:
            if rng.random() < 0.4:
                worker.save(hashes, range(first, first + 8))
            else:
                result = worker.load(hashes, range(HALF, HALF + 8))
                wrong = [at for at in range(result.num_blocks) if worker.block(HALF + at) != worker.block(first + at)]
                failed += [(number, at) for at in wrong]
        except KVStoreError as error:
            failed.append(error)


@pytest.mark.parametrize("seed", [1, 2])
def test_faults_of_all_kinds_at_once(start, cluster, reads, writes, seed):
    store: Store = start(disk_timeout_s=0.15, transfer_timeout_s=3.0, call_timeout_s=2.0, disk_capacity_bytes=1 << 18)
    rng, failed, pause = random.Random(seed), [], threading.Event()

    def fault(file, first):
        chance = rng.random()
        if chance < 0.05:
            raise OSError(rng.choice([errno.EIO, errno.ENOSPC]), "broken")
        if chance < 0.08:
            pause.wait(0.3)  # It hangs for a while: longer than its time limit.

    reads.before = writes.before = fault
    # All workers have the same bytes, so whoever saved a block, it is right.
    workers = [cluster.worker("a", 2 * HALF, seed=7) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(store, worker, 10 * seed + at, failed)) for at, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        chance = rng.random()
        if chance < 0.2:
            store.core.state.pool_service.clear(cluster.hashes(1).namespace)
        elif chance < 0.7:
            store.core.pool.discard([rng.randrange(store.core.pool.num_slots) for _ in range(20)])
        elif store.slots.exists():
            with store.slots.open("r+b") as file:
                file.seek(rng.randrange(1 << 17))
                file.write(rng.randbytes(64))
        store.check()
        pause.wait(0.01)
    for thread in threads:
        thread.join(SOON_S)
    assert failed == []
    reads.before = writes.before = lambda file, first: None
    wait_until(lambda: not store.disk.is_off, 30.0)
    wait_until(lambda: store.core.pool.stats().num_writing == 0)
    store.settle()
    assert store.core.pool.stats().num_pinned == store.disk.pool.stats().num_pinned == 0
    assert store.core.state.fetcher.flights.num_waiting == 0
    # And it works.
    hashes = cluster.hashes(8, seed=99)
    before = store.dropped("off")
    store.save(hashes, is_written=False)
    # On a busy machine a call may take long for the time limit of this test: then these blocks are left out.
    wait_until(lambda: store.disk.pool.lookup(hashes) == 8 or store.dropped("off") > before)
    store.restart(disk_timeout_s=SOON_S)
    store.save(hashes)
    store.empty_memory()
    assert store.load(hashes).num_disk == 8
    store.restart()
    assert store.load(hashes).num_disk == 8
