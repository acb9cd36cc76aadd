"""Which cores a benchmark's processes run on."""

import os
import threading

from waiting import eventually

from kvstore.actors.bench.cores import faster_half, keep_on, kept_awake


def test_half_of_the_cores_are_chosen_where_there_are_enough_and_this_thread_keeps_all():
    mine = os.sched_getaffinity(0)
    assert faster_half(least=len(mine)) == mine
    if len(mine) > 1:
        chosen = faster_half(least=1)
        assert chosen < mine
        assert len(chosen) == len(mine) // 2
    assert os.sched_getaffinity(0) == mine


def test_every_thread_of_a_process_is_kept_there_and_one_that_ended_is_no_error():
    mine, seen, go = os.sched_getaffinity(0), [], threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(5), seen.append(os.sched_getaffinity(0))))
    thread.start()
    one = {min(mine)}
    try:
        keep_on(one, [2**22 + 1, os.getpid()])
        go.set()
        thread.join(5)
        assert seen == [one]
        assert os.sched_getaffinity(0) == one
    finally:
        keep_on(mine, [os.getpid()])


def children():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as listed:
        return {int(pid) for pid in listed.read().split()}


def test_no_core_sleeps_meanwhile_and_what_keeps_it_awake_gives_way_and_ends():
    before, mine = children(), os.sched_getaffinity(0)

    def spinning():
        started = children() - before
        policies = {os.sched_getscheduler(pid) for pid in started}
        return policies == {os.SCHED_IDLE} and started

    with kept_awake():
        spinners = eventually(spinning)
        assert sorted(core for pid in spinners for core in os.sched_getaffinity(pid)) == sorted(mine)
    assert not spinners & children()
