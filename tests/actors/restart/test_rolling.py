"""Nodes that are restarted one after the other: their blocks stay, and no answer is ever wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import pytest
import ray
from click.testing import CliRunner

import kvstore
from kvstore.actors.restart import rolling
from kvstore.actors.restart.holding import make_holder
from kvstore.cli import main
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError, StoreDraining

pytestmark = pytest.mark.ray
CAPACITY = 2 << 20


@pytest.fixture(scope="module")
def store(ray_cluster):
    made = kvstore.start(CAPACITY, name="warm", lease_ttl_s=5.0)
    yield made
    made.destroy()


def names_of(store):
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"].split("/")[2] for actor in found if f"/{store.config.name}/" in actor["name"])


class Traffic(threading.Thread):
    """Loads and saves all the time on one node, with a new client after each restart; compares every byte."""

    def __init__(self, store, space, node_id, chains, open_engine):
        super().__init__(daemon=True)
        self.store, self.space, self.node_id, self.chains, self.open = store, space, node_id, chains, open_engine
        self.is_over, self.failure = threading.Event(), None
        self.num_rounds, self.num_loaded = 0, 0

    def run(self):
        try:
            while not self.is_over.is_set():
                with contextlib.suppress(KVStoreError):
                    self._use(self.open(self.store, self.space, self.node_id))
                time.sleep(0.02)
        except BaseException as error:  # noqa: BLE001 - raised in the test.
            self.failure = error

    def _use(self, engine):
        while not self.is_over.is_set():
            for number, chain in enumerate(self.chains):
                result = engine.load(chain, timeout_s=1.0)  # Asserts that what it calls usable has the right bytes.
                self.num_loaded += result.num_blocks
                if number % 3 == self.num_rounds % 3:
                    engine.save(chain)
            self.num_rounds += 1
            time.sleep(0.02)  # Leaves the processor to the stores.
            engine.client.lookup(self.chains[0])  # Raises if the store has ended.

    def end(self):
        self.is_over.set()
        self.join(60)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


def test_a_rolling_restart_with_a_changed_setting_keeps_the_blocks(
    store, make_space, chain_of, node_ids, open_engine, eventually
):
    space = make_space("rolling")
    chains = {
        node: [chain_of(space, 8, seed) for seed in seeds]
        for node, seeds in zip(node_ids, [range(3), range(3, 6)], strict=True)
    }
    epochs = {node: said["epoch"] for node, said in store.stats()["nodes"].items()}
    traffic = [Traffic(store, space, node, chains[node], open_engine) for node in node_ids]
    for each in traffic:
        engine = open_engine(store, space, each.node_id)
        for chain in each.chains:
            engine.save(chain)
        each.start()
    try:
        eventually(lambda: all(each.num_rounds > 1 for each in traffic), 30)
        found = store.restart(wait_s=5.0, max_hard_pinned_fraction=0.25)
        before = [each.num_rounds for each in traffic]
        eventually(lambda: all(each.num_rounds > then for each, then in zip(traffic, before, strict=True)), 30)
    finally:
        for each in traffic:
            each.end()
    assert set(found) == set(node_ids)
    for node in node_ids:
        assert found[node]["is_warm"], found
        assert found[node]["num_blocks"] >= 0.9 * 3 * 8
    nodes = store.stats()["nodes"]
    assert all(nodes[node]["epoch"] != epochs[node] for node in node_ids)
    assert (store.config.max_hard_pinned_fraction, kvstore.connect("warm").config) == (0.25, store.config)
    assert names_of(store) == ["directory", "node", "node", "supervisor"]
    for node in node_ids:
        engine = open_engine(store, space, node)
        assert sum(engine.client.lookup(chain, remote=False).num_local for chain in chains[node]) >= 0.9 * 3 * 8
        ray.get(kvstore.node_store(node, name="warm").check_integrity.remote(), timeout=30)


class LateWriter:
    """A worker that has claimed slots and not written them; it keeps its mapping, as a copy under way does."""

    def begin(self, control_path, space, chain):
        from kvstore.blocks.codec import decode_counts, encode
        from kvstore.config import PROTOCOL_VERSION
        from kvstore.memory.arena import attach_arena
        from kvstore.rpc.connect import connect_local, greeting_of
        from kvstore.rpc.framing import OWNER_KEY_DIGITS, Op
        from kvstore.rpc.messages import Attach, Prepare, decode_ticket

        hello = {"role": "client", "protocol": PROTOCOL_VERSION, "owner": "0" * OWNER_KEY_DIGITS}
        self.client, file = connect_local(control_path, hello, timeout_s=5.0)
        self.memory = attach_arena(file, greeting_of(self.client).arena_bytes).memory
        attach = encode(Attach(space.digest, space.shape.block_bytes))
        self.slot_bytes = decode_counts(self.client.call(Op.ATTACH, attach, timeout_s=5.0))["slot_bytes"]
        ticket = self.client.call(Op.PREPARE_STORE, encode(Prepare(chain, 1)), timeout_s=5.0)
        self.slots = list(decode_ticket(ticket).slots)
        return self.slots, os.getpid()

    def write(self):
        for slot in self.slots:
            self.memory[slot * self.slot_bytes :][: self.slot_bytes] = b"\xff" * self.slot_bytes


def counts(store, node):
    return store.stats()["nodes"][node]["pool"]


def test_a_worker_that_is_frozen_across_the_restart_writes_into_no_new_block(
    store, make_space, chain_of, node_ids, open_engine, eventually, stopped, get
):
    node, space = node_ids[0], make_space("late")
    old = open_engine(store, space, node)
    kept = [chain_of(space, 8, seed) for seed in range(100, 104)]
    for chain in kept:
        old.save(chain)
    late = ray.remote(LateWriter).options(num_cpus=0.1).remote()
    try:
        slots, pid = get(late.begin.remote(store.control_path(node_id=node), space, chain_of(space, 6, 200)))
        stopped(pid)
        for _ in range(2):  # The next life but one knows it, too.
            found = store.restart([node], wait_s=0.5)[node]
            assert (found["is_warm"], found["num_held_slots"]) == (True, 6)
        stopped.resume()
        engine, used = open_engine(store, space, node), set()
        for chain in kept:
            assert engine.load(chain).num_blocks == 8
        num_slots = counts(store, node)["num_slots"]
        for seed in range(300, 300 + num_slots // 60 + 2):  # More than the node holds.
            chain = chain_of(space, 60, seed)
            engine.save(chain)
            get(late.write.remote())
            assert engine.load(chain).num_blocks > 0  # And compares their bytes.
            used |= set(engine.slots(chain))
        assert used.isdisjoint(slots)
        assert counts(store, node)["num_writing"] == 6
    finally:
        stopped.resume()
        ray.kill(late)
    eventually(lambda: counts(store, node)["num_writing"] == 0, 20)
    ray.get(kvstore.node_store(node, name="warm").check_integrity.remote(), timeout=30)


class OldReader:
    """A worker that has leased blocks for an hour."""

    def begin(self, control_path, space, chain):
        from kvstore import Client

        self.client = Client(control_path, space)
        self.lease = self.client.lease(chain, ttl_s=3600.0)
        return len(self.lease)


def test_slots_that_a_worker_had_leased_before_two_restarts_are_free_once_it_is_dead(
    store, make_space, chain_of, node_ids, open_engine, eventually, get
):
    node, space = node_ids[1], make_space("old-reader")
    chain = chain_of(space, 5)
    open_engine(store, space, node).save(chain)
    reader = ray.remote(OldReader).options(num_cpus=0.1).remote()
    try:
        assert get(reader.begin.remote(store.control_path(node_id=node), space, chain)) == 5
        store.clear(space)
        for _ in range(2):
            found = store.restart([node], wait_s=0.2)[node]
            assert (found["is_warm"], found["num_held_slots"]) == (True, 5)
        assert counts(store, node)["num_writing"] == 5
    finally:
        ray.kill(reader)
    eventually(lambda: counts(store, node)["num_writing"] == 0, 20)
    ray.get(kvstore.node_store(node, name="warm").check_integrity.remote(), timeout=30)


def test_a_store_that_is_killed_while_it_gives_or_after_it_took_leaves_an_empty_one(
    store, make_space, chain_of, node_ids, open_engine, eventually, get
):
    node, space = node_ids[0], make_space("killed")
    engine, chain = open_engine(store, space, node), chain_of(space, 8, 1)
    engine.save(chain)
    engine.client.lease(chain, ttl_s=60.0)  # So the old store waits for its end when it is killed.
    results = []
    restart = threading.Thread(target=lambda: results.append(store.restart([node], wait_s=30.0)), daemon=True)
    pid = get(kvstore.node_store(node, name="warm").pids.remote())["store"]
    restart.start()

    def is_drained():
        with contextlib.suppress(StoreDraining):
            engine.client.lease(chain_of(space, 1, 2)).release()
            return False
        return True

    eventually(is_drained, 30)
    os.kill(pid, signal.SIGKILL)
    restart.join(90)
    assert (results[0][node]["is_warm"], results[0][node]["num_blocks"]) == (False, 0)
    assert "gave nothing" in results[0][node]["why_cold"]
    engine = open_engine(store, space, node)
    assert engine.load(chain).num_blocks == 0
    engine.save(chain)
    os.kill(get(kvstore.node_store(node, name="warm").pids.remote())["store"], signal.SIGKILL)

    def is_empty():
        with contextlib.suppress(KVStoreError):
            return open_engine(store, space, node).load(chain).num_blocks == 0
        return False

    eventually(is_empty, 60)
    assert not get(kvstore.node_store(node, name="warm").beginning.remote())["is_warm"]
    assert names_of(store) == ["directory", "node", "node", "supervisor"]


def test_what_cannot_be_is_refused_another_capacity_keeps_the_blocks_and_cold_is_empty(
    store, make_space, chain_of, node_ids, open_engine, eventually
):
    node, space = node_ids[1], make_space("cold")
    engine, chain = open_engine(store, space, node), chain_of(space, 4)
    engine.save(chain)
    for error, node_id, changes in (
        (ConfigError, None, {"lane": "sea"}),
        (ConfigError, None, {"colour": 1}),
        (ConfigError, None, {"name": "other"}),
        (ConfigError, None, {"capacity": "4TiB"}),
        (InvalidRequest, ["nowhere"], {}),
        (InvalidRequest, node, {}),
        (InvalidRequest, 5, {}),
    ):
        with pytest.raises(error):
            store.restart(node_id, **changes)
    assert engine.load(chain).num_blocks == 4
    found = store.restart([node[:12]], capacity="3MiB")[node]
    assert (found["is_warm"], found["num_blocks"] >= 4, store.config.capacity_bytes) == (True, True, 3 << 20)
    assert open_engine(store, space, node).load(chain).num_local == 4
    # As a restart that was killed in the middle leaves it.
    ray.kill(ray.get_actor("raykv/warm/supervisor", namespace="raykv"))
    eventually(lambda: "supervisor" not in names_of(store), 20)
    done = CliRunner().invoke(
        main, ["restart", "--name", "warm", "--node", node, "--cold", "--json", "--set", "save_wait_s=0"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)[node]
    assert (said["is_warm"], said["num_blocks"], said["why_cold"]) == (False, 0, "cold was asked for")
    assert kvstore.connect("warm").config.save_wait_s == 0.0
    assert open_engine(store, space, node).load(chain).num_blocks == 0


def test_cold_is_empty_also_after_a_restart_that_was_killed_when_the_memory_was_given(
    store, make_space, chain_of, node_ids, open_engine, get
):
    node, space = node_ids[1], make_space("left")
    engine, chain = open_engine(store, space, node), chain_of(space, 4)
    engine.save(chain)
    _, path = make_holder("warm", node, 0.0)
    assert get(kvstore.node_store(node, name="warm").hand_over.remote(path, 0.0))["num_blocks"] >= 4
    said = store.restart([node], cold=True)[node]
    assert (said["is_warm"], said["num_blocks"]) == (False, 0)
    assert open_engine(store, space, node).load(chain).num_blocks == 0
    assert names_of(store) == ["directory", "node", "node", "supervisor"]


def test_a_restart_goes_on_with_the_memory_that_was_given_to_one_that_was_killed(
    store, make_space, chain_of, node_ids, open_engine, eventually, get
):
    node, space = node_ids[0], make_space("goes-on")
    engine, chain = open_engine(store, space, node), chain_of(space, 4)
    engine.save(chain)
    _, path = make_holder("warm", node, 0.0)
    assert get(kvstore.node_store(node, name="warm").hand_over.remote(path, 0.0))["num_blocks"] >= 4
    said = store.restart([node])[node]
    assert said["is_warm"], said
    assert open_engine(store, space, node).load(chain).num_local == 4
    eventually(lambda: names_of(store) == ["directory", "node", "node", "supervisor"], 60)


def test_an_on_step_that_raises_is_not_called_again_and_ends_no_restart(store, node_ids, caplog):
    steps = []

    def on_step(*step):
        steps.append(step)
        raise BrokenPipeError("nobody reads")

    found = store.restart(wait_s=0.0, on_step=on_step)
    assert (set(found), len(steps)) == (set(node_ids), 1)
    assert sum("on_step raised" in record.getMessage() for record in caplog.records) == 1


def test_a_node_without_a_store_fails_with_the_reason_that_is_known_already(store, node_ids, monkeypatch):
    monkeypatch.setattr(rolling, "_unworkable", lambda supervisor, node_id: "disk_path: wanted another folder")
    asked = []

    def wait_for_next(path, node_id, old_id, supervisor, before, check):
        asked.append(before)
        return {"is_warm": False, "num_blocks": 0, "num_held_slots": 0, "why_cold": reasons.pop()}

    monkeypatch.setattr(rolling, "_wait_for_next", wait_for_next)
    reasons = ["", "the memory is of another shape"]
    turn = rolling.Turn("no-such-store", node_ids[0], None, store.config, 0.0, print, lambda: None)
    found = [turn.run(cold=False)["why_cold"] for _ in range(2)]
    assert found == ["the memory is of another shape", "the node had no store"]
    assert asked == ["", ""]
    reasons.append("")
    monkeypatch.setattr(rolling, "keep_longer", lambda name, node_ids: True)
    assert turn.run(cold=False)["why_cold"] == "the node had no store, and the memory that was kept for it was lost"
