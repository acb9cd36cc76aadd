"""What the next store of a node needs is checked while the present one serves, and before the memory is taken."""

from __future__ import annotations

import os
import socket

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.node.handover import taking
from kvstore.node.handover.needs import check_next, check_places, needs_of
from tests.kvstore.node.handover.lives import NODE, SETTINGS, Lives


def next_of(core, **changes):
    check_next(core, needs_of(StoreConfig(**(SETTINGS | changes))))


def test_a_disk_that_cannot_work_is_refused_also_where_a_present_setting_would_not_fit(cluster, tmp_path):
    disk = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}
    core = cluster.add(NODE, mover=False, **disk, disk_min_uses=2, block_bytes=1 << 17)
    before = sorted(os.listdir(tmp_path / "kv"))
    next_of(core, **disk)
    next_of(core)
    next_of(core, **(disk | {"disk_path": str(tmp_path / "other")}))
    assert (sorted(os.listdir(tmp_path)), sorted(os.listdir(tmp_path / "kv"))) == (["kv"], before)
    for changes in ({"disk_path": "/proc/nvme"}, {"disk_capacity_bytes": 1 << 60}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            next_of(core, **(disk | changes))


def test_more_memory_than_the_machine_has_is_refused(cluster):
    core = cluster.add(NODE, mover=False)
    next_of(core, capacity_bytes=1 << 20)
    with pytest.raises(ConfigError, match="capacity"):
        next_of(core, capacity_bytes=1 << 60)


def test_settings_of_a_later_version_do_not_matter(cluster):
    core = cluster.add(NODE, mover=False)
    check_next(core, {**needs_of(core.state.config), "colour_of_blocks": "red"})


def test_an_address_of_another_process_is_refused_and_the_own_ones_are_taken_over(cluster):
    pytest.importorskip("zmq")
    core = cluster.add(
        NODE, mover=False, events_endpoint="tcp://127.0.0.1:0", events_replay_endpoint="tcp://127.0.0.1:0"
    )
    stats = core.state.events.stats()
    next_of(core, events_endpoint=stats["endpoint"], events_replay_endpoint=stats["replay_endpoint"])
    with pytest.raises(ConfigError, match="events_endpoint: wanted an address that is free"):
        check_places(StoreConfig(events_endpoint=stats["endpoint"]), NODE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for names in (["events_endpoint"], ["events_endpoint", "events_replay_endpoint"]):
            wanted = dict.fromkeys(names, stats["endpoint"]) | {names[-1]: where}
            with pytest.raises(ConfigError, match=f"{names[-1]}: wanted an address that is free"):
                next_of(core, **wanted)


def test_the_own_port_is_tried_at_another_host(cluster):
    pytest.importorskip("zmq")
    core = cluster.add(NODE, mover=False, events_endpoint="tcp://127.0.0.1:0")
    own = core.state.events.stats()["endpoint"]
    next_of(core, events_endpoint=own)
    with pytest.raises(ConfigError, match="events_endpoint: wanted an address that is free"):
        next_of(core, events_endpoint=own.replace("127.0.0.1", "192.0.2.77"))


def test_an_address_in_a_folder_that_cannot_be_used_is_refused(tmp_path):
    check_places(StoreConfig(events_endpoint=f"ipc://{tmp_path}/events"), NODE)
    with pytest.raises(ConfigError, match="events_endpoint: wanted an address in a folder that is there"):
        check_places(StoreConfig(events_endpoint=f"ipc://{tmp_path}/none/events"), NODE)


def test_a_store_that_cannot_have_its_disk_leaves_the_memory_for_the_one_after_it(cluster, monkeypatch):
    # Both lives are in this process, so its end is not waited for.
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: True)
    monkeypatch.setattr(taking, "pid_of", lambda pidfd: 1)
    lives = Lives(cluster)
    cluster.add(NODE, **SETTINGS)
    worker, hashes = cluster.worker(NODE), cluster.hashes(3)
    worker.save(hashes, range(3))
    worker.client.close()
    lives.give()
    with pytest.raises(ConfigError, match="disk_path"):
        lives.take(disk_path="/proc/nvme", disk_capacity_bytes=1 << 20)
    beginning = lives.take()
    assert (beginning.is_warm, beginning.num_blocks) == (True, 3)
