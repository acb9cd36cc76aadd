"""Old processes: their end is noticed, and only then are their slots free."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kvstore.node.handover.processes import OldProcesses, OldUse, end, has_ended, pid_of
from kvstore.runtime import clock


def test_a_process_has_ended_when_it_is_killed_and_not_while_it_is_stopped(process):
    assert not has_ended(process.pidfd)
    os.kill(process.pid, signal.SIGSTOP)
    assert not has_ended(process.pidfd, 0.2)
    os.kill(process.pid, signal.SIGKILL)
    assert has_ended(process.pidfd, 10.0)


def test_one_that_does_not_end_is_killed(process):
    os.kill(process.pid, signal.SIGSTOP)
    assert end(process.pidfd, 0.1, 10.0)
    assert process.wait(10) == -signal.SIGKILL
    assert end(process.pidfd, 0.0, 0.0)


def test_a_pidfd_tells_its_process_and_another_file_tells_none(process):
    assert pid_of(process.pidfd) == process.pid
    with open(os.devnull) as other:
        assert pid_of(other.fileno()) is None
    process.kill()
    process.wait(10)
    assert pid_of(process.pidfd) == -1
    closed = os.dup(process.pidfd)
    os.close(closed)
    assert pid_of(closed) is None


def test_slots_are_free_after_their_time_and_the_end_of_all_their_processes(process, wait_until):
    released, now_s = [], clock.now_s()
    pidfd, own = os.dup(process.pidfd), os.pidfd_open(os.getpid())
    uses = [
        OldUse("over", 0.0, ()), OldUse("later", now_s + 1.5, ()), OldUse("process", 0.0, (pidfd,)),
        OldUse("both", 0.0, (pidfd, own)),
    ]  # fmt: skip
    old = OldProcesses((pidfd, own), uses, released.append)
    old.start()
    wait_until(lambda: released == ["over"])
    wait_until(lambda: released == ["over", "later"])
    process.kill()
    wait_until(lambda: released == ["over", "later", "process"])
    assert [use.owner for use in old.uses()] == ["both"]
    old.stop()
    assert not old.thread.is_alive()
    old.close()


@pytest.mark.parametrize(
    ("until_s", "ended", "written_is_over", "read_is_over"),
    [
        (40.0, {1, 2}, True, True),
        (60.0, {1, 2}, False, True),
        (60.0, {1}, False, False),
        (60.0, set(), False, False),
        (40.0, {1}, False, True),
        (40.0, set(), False, True),
    ],
)
def test_written_slots_wait_for_time_and_processes_and_read_ones_for_the_first(
    until_s, ended, written_is_over, read_is_over
):
    assert OldUse("a", until_s, (1, 2)).is_over(50.0, ended) == written_is_over
    assert OldUse("a", until_s, (1, 2), is_read=True).is_over(50.0, ended) == read_is_over


@pytest.mark.parametrize("is_read", [False, True])
def test_slots_without_processes_wait_for_their_time(is_read):
    assert not OldUse("a", 60.0, (), is_read).is_over(50.0, {1})
    assert OldUse("a", 40.0, (), is_read).is_over(50.0, set())


def test_slots_that_are_only_read_are_free_when_their_last_reader_has_ended(process, wait_until):
    released, pidfd, own = [], os.dup(process.pidfd), os.pidfd_open(os.getpid())
    uses = [OldUse("one", 1e12, (pidfd,), is_read=True), OldUse("two", 1e12, (pidfd, own), is_read=True)]
    old = OldProcesses((pidfd, own), uses, released.append)
    old.start()
    process.kill()
    wait_until(lambda: released == ["one"])
    assert [use.owner for use in old.uses()] == ["two"]
    old.stop()
    old.close()


def test_a_release_that_fails_is_tried_again(wait_until):
    failures = iter([RuntimeError("once")])

    def release(owner):
        for failure in failures:
            raise failure

    old = OldProcesses((), [OldUse("a", 0.0, ())], release)
    began_s = time.monotonic()
    old.start()
    wait_until(lambda: not old.thread.is_alive())
    assert old.uses() == []
    assert time.monotonic() - began_s < 20


def test_pidfds_are_closed_once_also_if_the_thread_has_closed_them(wait_until):
    old = OldProcesses((os.pidfd_open(os.getpid()),), [], lambda owner: None)
    old.start()
    wait_until(lambda: not old.thread.is_alive())
    old.stop()
    with open(os.devnull) as other:  # It has the number of the closed pidfd.
        old.close()
        assert os.fstat(other.fileno())
