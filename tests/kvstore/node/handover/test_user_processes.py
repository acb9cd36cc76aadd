"""The processes that a parcel names: all that may still use a slot, each once, and no other."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.node.handover import giving
from kvstore.node.handover.giving import UserProcesses
from kvstore.node.handover.processes import OldUse, pid_of
from kvstore.pool.handover.image import OldReaders, OldWriters
from kvstore.rpc.connection import Role

OWN_UNTIL_S = 77.0


def connection(process, owner="client-1", role=Role.CLIENT, pidfd=None):
    pidfd = process.pidfd if pidfd is None else pidfd
    return SimpleNamespace(role=role, owner=owner, pid=process.pid, pidfd=pidfd, ended=False)


def processes_of(*connections, old_uses=None, mover=None):
    """Return the processes of a store in which each of these owners has something, and `mover` reads."""
    holds = SimpleNamespace(holds=lambda owner: True)
    old = None if old_uses is None else SimpleNamespace(processes=SimpleNamespace(uses=lambda: old_uses))
    control = SimpleNamespace(server=SimpleNamespace(connections=connections), handoffs=holds)
    state = SimpleNamespace(pool_service=SimpleNamespace(current=holds), mover=SimpleNamespace(connection=mover))
    return contextlib.closing(UserProcesses(SimpleNamespace(control=control, state=state, old=old)))


def writers(*owners, until_s=0.0):
    return OldWriters(owners, until_s, np.array([3], np.int32))


READ_UNTIL_S = 99.0


def read(made, *owners):
    """Return what holds slots that only these owners have leases of; blocks that were cleared are held alike."""
    slots = np.array([3], np.int32)
    held = made.held_by_readers(OldReaders(owners, READ_UNTIL_S, slots))
    assert held.is_read
    assert made.held(OldWriters((), READ_UNTIL_S, slots, owners), {}, OWN_UNTIL_S) == held
    return held


def pids(made, held):
    return sorted(pid_of(made.pidfds[at]) for at in held.processes)


def test_slots_of_a_worker_wait_for_its_process_and_for_no_time(process):
    with processes_of(connection(process)) as made:
        held = made.held(writers("client-1"), {}, OWN_UNTIL_S)
        assert (pids(made, held), held.until_s) == ([process.pid], 0.0)


def test_slots_of_ranks_wait_for_all_of_them(process):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other.pidfd = os.pidfd_open(other.pid)
    try:
        with processes_of(connection(process), connection(other, "client-2")) as made:
            held = made.held(writers("client-1", "client-2"), {}, OWN_UNTIL_S)
            assert pids(made, held) == sorted([process.pid, other.pid])
    finally:
        other.kill()
        other.wait(10)
        os.close(other.pidfd)


def test_slots_that_the_store_fills_wait_for_it_for_its_mover_and_for_their_readers(process):
    mover = connection(process, "mover-1", Role.MOVER)
    turned_away = connection(SimpleNamespace(pid=os.getppid(), pidfd=os.pidfd_open(os.getppid())), "m", Role.MOVER)
    for connections in ([mover, turned_away], [turned_away, mover]):
        with processes_of(*connections, mover=mover) as made:
            held = made.held(writers("!mover"), {}, OWN_UNTIL_S)
            assert (pids(made, held), held.until_s) == (sorted([os.getpid(), process.pid]), OWN_UNTIL_S)
    os.close(turned_away.pidfd)


def test_slots_of_a_worker_over_ray_wait_for_their_deadline(process):
    with processes_of() as made:
        held = made.held(writers("ray:job", until_s=55.0), {}, OWN_UNTIL_S)
        assert (pids(made, held), held.until_s) == ([], 55.0)


def test_what_waited_for_processes_of_the_life_before_still_does(process):
    other = os.pidfd_open(os.getppid())
    uses = [OldUse("old-writer-0", 66.0, (process.pidfd, other))]
    with processes_of(old_uses=uses) as made:
        held = made.held(writers("old-writer-0"), {}, OWN_UNTIL_S)
        assert (pids(made, held), held.until_s) == (sorted([process.pid, os.getppid()]), 66.0)
    os.close(other)


def test_a_pidfd_whose_number_is_another_process_by_now_is_not_taken(process):
    number = os.pidfd_open(os.getppid())
    try:
        with processes_of(connection(process, pidfd=number)) as made:
            assert made.held(writers("client-1"), {}, OWN_UNTIL_S).processes == ()
    finally:
        os.close(number)


def test_a_live_worker_whose_process_cannot_be_named_ends_the_giving(process):
    with processes_of(connection(process, pidfd=-1)) as made, pytest.raises(ConfigError, match="cannot name"):
        made.held(writers("client-1"), {}, OWN_UNTIL_S)


def test_a_worker_that_holds_something_and_has_no_connection_ends_the_giving(process):
    with processes_of(connection(process)) as made, pytest.raises(ConfigError, match="client-2"):
        made.held(writers("client-2"), {}, OWN_UNTIL_S)


def test_slots_that_are_only_read_have_a_time_and_the_processes_of_all_readers(process, other):
    with processes_of(connection(process), connection(other, "client-2")) as made:
        one, both = read(made, "client-1"), read(made, "client-1", "client-2")
        assert (pids(made, one), one.until_s) == ([process.pid], READ_UNTIL_S)
        assert (pids(made, both), both.until_s) == (sorted([process.pid, other.pid]), READ_UNTIL_S)


@pytest.mark.parametrize("reader", ["ray:job", "store-1", "bring-1", "adopt", "client-9", "old-reader-9"])
def test_slots_with_one_reader_that_has_no_process_wait_for_their_time_only(process, reader):
    with processes_of(connection(process)) as made:
        for owners in [(reader,), ("client-1", reader), (reader, "client-1")]:
            held = read(made, *owners)
            assert (held.processes, held.until_s) == ((), READ_UNTIL_S)


def test_a_reader_whose_process_cannot_be_named_ends_no_giving_and_its_slots_wait_for_their_time(process):
    number = os.pidfd_open(os.getppid())
    try:
        for pidfd in (-1, number):  # The second is of another process by now.
            with processes_of(connection(process, pidfd=pidfd)) as made:
                held = read(made, "client-1")
                assert (held.processes, held.until_s) == ((), READ_UNTIL_S)
    finally:
        os.close(number)


def test_a_reader_of_which_one_pidfd_is_of_another_process_waits_for_its_time(process):
    number = os.pidfd_open(os.getppid())
    try:
        known = connection(SimpleNamespace(pid=os.getppid(), pidfd=number), "client-2")
        for more in ([], [known]):
            with processes_of(*more, connection(process), connection(process, pidfd=number)) as made:
                assert read(made, "client-1").processes == ()
    finally:
        os.close(number)


def test_slots_that_are_written_and_read_wait_for_the_processes_of_their_writers(process, other):
    with processes_of(connection(process), connection(other, "client-2")) as made:
        entry = OldWriters(("client-1",), READ_UNTIL_S, np.array([3], np.int32), ("client-2",))
        held = made.held(entry, {}, OWN_UNTIL_S)
        assert (pids(made, held), held.until_s, held.is_read) == ([process.pid], READ_UNTIL_S, False)


@pytest.mark.parametrize("owner", ["old-reader-0", "old-writer-0"])
def test_what_was_only_read_in_the_life_before_still_has_its_processes_and_its_time(process, other, owner):
    uses = [OldUse(owner, 98.0, (process.pidfd, other.pidfd), is_read=True)]
    with processes_of(old_uses=uses) as made:
        held = _carried(made, owner)
        assert (pids(made, held), held.until_s) == (sorted([process.pid, other.pid]), 98.0)
        other.kill()
        other.wait(10)
    with processes_of(old_uses=uses) as made:
        held = _carried(made, owner)
        assert (pids(made, held), held.until_s) == ([process.pid], 98.0)
        process.kill()
        process.wait(10)
    with processes_of(old_uses=uses) as made:
        held = _carried(made, owner)
        assert (held.processes, held.until_s) == ((), 0.0)


def _carried(made, owner):
    """Return what holds slots of an owner of the life before, as the pool of this life has them."""
    slots = np.array([3], np.int32)
    if owner.startswith("old-reader-"):
        held = made.held_by_readers(OldReaders((owner,), 98.0, slots))
    else:
        held = made.held(OldWriters((owner,), 0.0, slots), {}, OWN_UNTIL_S)
    assert held.is_read
    return held


def test_what_had_only_a_time_in_the_life_before_still_has_it():
    with processes_of(old_uses=[OldUse("old-writer-0", 98.0, (), is_read=True)]) as made:
        held = _carried(made, "old-writer-0")
        assert (held.processes, held.until_s) == ((), 98.0)


def test_a_reader_of_the_life_before_and_one_of_this_are_both_waited_for(process, other):
    uses = [OldUse("old-reader-0", 98.0, (process.pidfd,), is_read=True)]
    with processes_of(connection(other), old_uses=uses) as made:
        assert pids(made, read(made, "client-1", "old-reader-0")) == sorted([process.pid, other.pid])


def test_readers_get_the_room_that_writers_leave_and_else_wait_for_their_time(process, other, monkeypatch):
    monkeypatch.setattr(giving, "MOST_DESCRIPTORS", 3)
    with processes_of(connection(process), connection(other, "client-2")) as made:
        cleared = OldWriters((), READ_UNTIL_S, np.array([3], np.int32), ("client-1",))
        written, only_read = made.held_by_all([cleared, writers("client-2")], {}, OWN_UNTIL_S)
        assert (pids(made, written), written.is_read) == ([other.pid], False)
        assert (only_read.processes, only_read.until_s, only_read.is_read) == ((), READ_UNTIL_S, True)
        assert len(made.pidfds) == 3


def test_only_processes_that_are_waited_for_are_sent(process):
    mover, idle = connection(process, "mover-1", Role.MOVER), os.pidfd_open(os.getppid())
    idler = connection(SimpleNamespace(pid=os.getppid(), pidfd=idle), "client-2")
    with processes_of(mover, idler, connection(process), mover=mover) as made:
        held = made.held(writers("client-1"), {}, OWN_UNTIL_S)
        assert (pids(made, held), len(made.pidfds)) == ([process.pid], 2)
    os.close(idle)


def test_without_a_descriptor_for_the_process_of_a_worker_nothing_is_given(process, monkeypatch):
    def none_left(fd, command, argument):
        raise OSError(errno.EMFILE, "too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(giving.fcntl, "fcntl", none_left)
    with pytest.raises(OSError, match="too many"), processes_of(connection(process)):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_processes_than_one_packet_takes_end_the_giving_and_leave_no_descriptor(process, monkeypatch):
    monkeypatch.setattr(giving, "MOST_DESCRIPTORS", 2)
    before = len(os.listdir("/proc/self/fd"))
    with processes_of(connection(process)) as made, pytest.raises(ConfigError, match="more than 2"):
        made.held(writers("client-1"), {}, OWN_UNTIL_S)
    assert len(os.listdir("/proc/self/fd")) == before
