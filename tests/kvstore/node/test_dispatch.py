"""What follows a mover's end, whatever else goes wrong in that moment."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.mover.transport import PeerDescription, ReadRequest


@pytest.fixture
def gone(cluster):
    """A node "a", and what is set when its mover is to be replaced."""
    core, event = cluster.add("a"), threading.Event()
    core.control.on_mover_gone = event.set
    return core, event


def test_a_mover_that_dies_while_no_thread_can_be_started_is_replaced(cluster, gone, monkeypatch):
    core, event = gone
    start, num_left = threading.Thread.start, [3]

    def refuse(thread):
        if thread.name == "raykv-mover-gone" and num_left[0]:
            num_left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    cluster.kill_mover("a")
    assert event.wait(10)
    assert num_left == [0]
    assert core.control.server.is_serving(5.0)


def test_what_the_end_of_a_mover_makes_somebody_raise_keeps_nobody_else_from_it(cluster, gone):
    """What was given up is over with its mover: kept, it would have every later mover killed."""
    core, event = gone
    heard = []

    def fail(done, error):
        heard.append(done.read_id)
        raise MemoryError

    nothing = np.zeros(0, np.int32)
    request = ReadRequest(peer="x/00/1", block_bytes=64, local_slots=nothing, remote_slots=nothing, notification=b"")
    peer = PeerDescription(agent=b"", address=0, slot_bytes=64, num_slots=1)
    # Of no blocks and in no chunks, the mover has nothing to say of it.
    ids = [core.state.mover.read(request, peer, fail, chunk_ends=nothing, timeout_s=60.0) for _ in range(3)]
    core.state.mover.unfinished.abandoned[99] = 0.0
    cluster.kill_mover("a")
    assert event.wait(10)
    assert sorted(heard) == ids
    assert core.state.mover.num_abandoned == 0
