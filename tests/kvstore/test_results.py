"""Jobs that the thread which waits for them may run."""

import threading

import pytest

from kvstore.errors import JobRunning, PeerLost
from kvstore.results import Job, Work


def nothing():
    """What comes after most of them."""


def job_of(work):
    return Job(work.future, "fetch of 3 blocks", lambda timeout_s: True, work=work)


def test_who_waits_long_enough_does_the_work_itself():
    work = Work(threading.get_ident, limit_s=5.0, after=nothing)
    job = job_of(work)
    assert job.result(5.0) == threading.get_ident()
    assert not work.do()
    assert job.result(0.1) == threading.get_ident(), "once"


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_who_waits_for_less_does_not(timeout_s):
    job = job_of(Work(lambda: 1, limit_s=5.0, after=nothing))
    with pytest.raises(JobRunning):
        job.result(timeout_s)
    assert not job.done()


def test_work_that_a_thread_has_begun_is_waited_for():
    begun, go = threading.Event(), threading.Event()
    work = Work(lambda: (begun.set(), go.wait(5), threading.get_ident())[-1], limit_s=5.0, after=nothing)
    thread = threading.Thread(target=work.see_done)
    thread.start()
    assert begun.wait(5)
    threading.Timer(0.05, go.set).start()
    assert job_of(work).result(5.0) == thread.ident
    thread.join(5)


def test_a_thread_of_the_client_ends_after_the_work_whoever_does_it():
    begun, go = threading.Event(), threading.Event()
    work = Work(lambda: (begun.set(), go.wait(5)), limit_s=5.0, after=nothing)
    waiter = threading.Thread(target=job_of(work).result)
    waiter.start()
    assert begun.wait(5)
    thread = threading.Thread(target=work.see_done)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "a client that is closed waits for its threads, and so for this job"
    go.set()
    thread.join(5)
    waiter.join(5)
    assert not thread.is_alive()


def test_what_it_raises_is_raised_where_the_result_is_asked_for():
    def fail():
        raise PeerLost("gone")

    with pytest.raises(PeerLost):
        job_of(Work(fail, limit_s=1.0, after=nothing)).result()


def test_work_that_was_given_up_is_not_done():
    done, given_back = [], []
    work = Work(lambda: done.append(1), limit_s=1.0, after=lambda: given_back.append(1))
    assert job_of(work).abandon()
    work.see_done()
    assert (done, given_back) == ([], [1])


def test_work_that_has_begun_elsewhere_is_abandoned_but_not_cancelled():
    given_up = []
    work = Work(lambda: 1, limit_s=1.0, after=nothing)
    work.begin()
    job = Job(work.future, "publication of 3 blocks", lambda timeout_s: bool(given_up.append(timeout_s)), work=work)
    assert not job.abandon(0.5)
    assert given_up == [0.5]
    work.see_done()
    assert job.result(0) == 1
    assert not work.do(), "once"


@pytest.mark.parametrize("inline", [True, False])
def test_what_comes_after_comes_once_and_not_before_the_result(inline):
    seen = []
    work = Work(lambda: 3, limit_s=1.0, after=lambda: seen.append(work.future.done()))
    if inline:
        assert job_of(work).result() == 3
        assert seen == [], "nobody waits for it"
    work.see_done()
    assert (seen, job_of(work).result()) == ([True], 3)
