"""Which cores a benchmark's processes run on."""

import os
import threading

from kvstore.actors.bench_cores import faster_half, keep_on


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
