"""Jobs that the thread which waits for them may run."""

import threading

import pytest

import kvstore
from kvstore.client.job import Job
from kvstore.client.results import BlockFailure, LoadResult, MissReason
from kvstore.client.work import Work, in_one_step, nothing
from kvstore.errors import InvalidRequest, JobRunning, PeerLost
from tests.kvstore.kept_work import see_done


def work_of(run, limit_s=5.0, after=nothing):
    return Work(lambda: in_one_step(run), limit_s, after)


def job_of(work):
    return Job(work.future, "fetch of 3 blocks", lambda timeout_s: True, work=work)


def test_who_waits_long_enough_does_the_work_itself():
    work = work_of(threading.get_ident, limit_s=5.0)
    job = job_of(work)
    assert job.result(5.0) == threading.get_ident()
    assert not work.do()
    assert job.result(0.1) == threading.get_ident(), "once"


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_who_waits_for_less_does_not(timeout_s):
    job = job_of(work_of(lambda: 1, limit_s=5.0))
    with pytest.raises(JobRunning):
        job.result(timeout_s)
    assert not job.done()


def test_work_that_a_thread_has_begun_is_waited_for():
    begun, go = threading.Event(), threading.Event()
    work = work_of(lambda: (begun.set(), go.wait(5), threading.get_ident())[-1], limit_s=5.0)
    thread = threading.Thread(target=see_done, args=(work,))
    thread.start()
    assert begun.wait(5)
    threading.Timer(0.05, go.set).start()
    assert job_of(work).result(5.0) == thread.ident
    thread.join(5)


def test_what_it_raises_is_raised_where_the_result_is_asked_for():
    def fail():
        raise PeerLost("gone")

    with pytest.raises(PeerLost):
        job_of(work_of(fail, limit_s=1.0)).result()


def test_work_that_was_given_up_is_not_done():
    done, given_back = [], []
    work = work_of(lambda: done.append(1), limit_s=1.0, after=lambda: given_back.append(1))
    assert job_of(work).abandon()
    see_done(work)
    assert (done, given_back) == ([], [1])


def test_work_that_has_begun_elsewhere_is_abandoned_but_not_cancelled():
    given_up = []
    work = work_of(lambda: 1, limit_s=1.0)
    work.begin()
    job = Job(work.future, "publication of 3 blocks", lambda timeout_s: bool(given_up.append(timeout_s)), work=work)
    assert not job.abandon(0.5)
    assert given_up == [0.5]
    see_done(work)
    assert job.result(0) == 1
    assert not work.do(), "once"


@pytest.mark.parametrize("inline", [True, False])
def test_what_comes_after_comes_once_and_not_before_the_result(inline):
    seen, told = [], []
    work = work_of(lambda: 3, limit_s=1.0, after=lambda: seen.append(work.future.done()))
    work.ended_elsewhere = lambda: told.append(work.future.done())
    if inline:
        assert job_of(work).result() == 3
        assert (seen, told) == ([], [True]), "nobody waits for it, and a thread of the client does it"
        work.after()
    see_done(work)
    assert (seen, job_of(work).result()) == ([True], 3)


def test_a_time_to_wait_is_a_number():
    job = job_of(work_of(lambda: 1))
    for wait in (job.result, job.abandon, lambda timeout: job.wait_on(None, timeout)):
        with pytest.raises(InvalidRequest, match="timeout: wanted a number of seconds, got 'x'"):
            wait("x")
    with pytest.raises(JobRunning):
        job.result(-1.0)
    assert job.result() == 1


def test_a_disk_that_is_slower_than_computing_is_left_out():
    shape = kvstore.KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32", block_size=4)
    assert shape.block_bytes == 512
    match = kvstore.Match(num_local=1, num_disk=5, disk_bytes_per_s=1000)
    # A block takes 0.512 s to read; 4 tokens take 0.5 s or 0.6 s to compute.
    assert match.worth_loading(shape, 8.0).num_blocks == 1
    assert match.worth_loading(shape, 4 / 0.6).num_blocks == 6
    assert match.worth_loading(shape, 0.0) is match
    unknown = kvstore.Match(num_local=1, num_disk=5)
    assert unknown.worth_loading(shape, 1e9) is unknown


def test_the_text_of_a_load_counts_its_failures_by_reason():
    def failed(index, reason, detail=""):
        return BlockFailure(index=index, block_ids=(index,), reason=reason, detail=detail)

    whole = LoadResult(num_blocks=3, num_local=3)
    assert str(whole) == repr(whole)
    result = LoadResult(
        num_blocks=1,
        failed=(
            failed(1, MissReason.POOL_FULL, "no slot"), failed(2, MissReason.NOT_FOUND),
            *(failed(index, MissReason.POOL_FULL, "no slot") for index in range(3, 90)),
        ),
    )  # fmt: skip
    assert "failed=(88 blocks pool_full: no slot; 1 blocks not_found)" in str(result)
    assert len(str(result)) < 400
    many = LoadResult(num_blocks=0, failed=tuple(failed(at, MissReason.OTHER, f"why {at}") for at in range(9)))
    assert str(many).count("why") == 4
    assert "and 5 reasons more" in str(many)
    assert type(result.failed[0]) is BlockFailure
