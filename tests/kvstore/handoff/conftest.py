"""Nodes with stages in host memory, for tests of hand-offs."""

import itertools

import pytest

from tests.kvstore.handoff.host_stages import BLOCK, HostSide, HostStage, StageArena


@pytest.fixture
def stages(cluster, monkeypatch):
    """Nodes a and b, whose movers can make stages; returns those that were made."""
    made = []

    def make(name, uuid, num_bytes):
        made.append(HostStage(name, uuid, num_bytes, cluster.network))
        return made[-1]

    def copier(engine, stage):
        memory = StageArena(HostStage.memories[stage.handle])
        return HostSide(engine, memory, stage.slot_bytes, stage.num_slots)

    cluster.make_stage = make
    uuids = itertools.count(1)
    known = {}
    link = "kvstore.client.handoff.stage_link"
    monkeypatch.setattr(f"{link}.stage_uuid", lambda layout: known.setdefault(id(layout), f"{next(uuids):02x}"))
    monkeypatch.setattr(f"{link}.StageCopier", copier)
    # This process copies slot by slot, so it is no lane to measure.
    for module in ("stages", "lanes"):
        monkeypatch.setattr(f"kvstore.handoff.{module}.WARM_BYTES", 8 * BLOCK)
    monkeypatch.setattr("kvstore.handoff.lanes._LEAST_GB_PER_S", 1e-4)
    for node in ("a", "b"):
        cluster.add(node)
    return made


@pytest.fixture
def pair(cluster, stages):
    """Workers on two nodes, each with a stage of 64 blocks."""
    workers = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    for worker in workers:
        assert worker.client.attach_handoff(64 * BLOCK).route == "gpu"
    return workers
