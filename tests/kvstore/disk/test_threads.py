"""The threads of a disk: nothing asked is forgotten, one that hangs turns the disk off, and it comes on again."""

import errno
import threading
import time

import pytest

from kvstore.disk.threads import DiskThreads, Read
from kvstore.errors import DiskUnavailable

#: Far longer than any step here takes.
SOON_S = 10.0


@pytest.fixture
def start(monkeypatch):
    """Start threads whose rests are short; a hanging operation of a test must end by itself or by `let_go`."""
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", 0.05)
    monkeypatch.setattr("kvstore.disk.threads._LOOK_S", 0.01)
    made = []

    def start(write_some=lambda: False, timeout_s=SOON_S, **more):
        threads = DiskThreads(write_some, timeout_s, **more)
        threads.start()
        made.append(threads)
        return threads

    yield start
    for threads in made:
        assert threads.stop(SOON_S)
        assert not any(thread.is_alive() for thread in threads.threads)


class Asked:
    """A read, and how it ended."""

    def __init__(self, run=lambda: None):
        self.is_over, self.began, self.error = threading.Event(), threading.Event(), None
        self._run = run
        self.read = Read(self._begin, self._end)

    def _begin(self):
        self.began.set()
        self._run()

    def _end(self, error):
        assert not self.is_over.is_set(), "ended twice"
        self.error = error
        self.is_over.set()

    def ended(self):
        assert self.is_over.wait(SOON_S), "the read was forgotten"
        return self.error


def refuse(code=errno.EIO):
    raise OSError(code, "no")


def test_single_reads_one_after_the_other_all_run(start):
    """A notification that wakes the thread that watches must not be the only one."""
    threads = start()
    for _ in range(50):
        asked = Asked()
        threads.read([asked.read])
        assert asked.ended() is None


def test_single_writes_one_after_the_other_all_run(start):
    wanted = threading.Semaphore(0)
    threads = start(lambda: wanted.release() is not None)
    for _ in range(50):
        threads.write_soon()
        assert wanted.acquire(timeout=SOON_S)


def test_reads_and_writes_from_many_threads_all_run(start):
    lock, left = threading.Lock(), [0]

    def write_some():
        with lock:
            left[0] -= left[0] > 0
            return left[0] > 0

    threads, asked = start(write_some), [Asked() for _ in range(200)]

    def ask(own):
        for each in own:
            with lock:
                left[0] += 1
            threads.write_soon()
            threads.read([each.read])

    askers = [threading.Thread(target=ask, args=(asked[at::4],)) for at in range(4)]
    for asker in askers:
        asker.start()
    assert all(each.ended() is None for each in asked)
    for asker in askers:
        asker.join(SOON_S)


def test_a_read_comes_before_writes_and_never_waits_for_all_of_them(start):
    go = threading.Event()
    entered = threading.Semaphore(0)

    def write_some():
        entered.release()
        go.wait(SOON_S)
        return True

    threads = start(write_some, num_threads=2)
    threads.write_soon()
    assert entered.acquire(timeout=SOON_S)
    asked = Asked()
    threads.read([asked.read])
    assert asked.ended() is None
    assert not entered.acquire(blocking=False), "half of the threads write at most"
    go.set()


def test_an_unexpected_error_of_a_read_is_told_and_ends_no_thread(start):
    """A8: an exception frees what was held, and the next call succeeds."""
    threads = start(num_threads=2)
    for _ in range(5):
        asked = Asked(lambda: 1 // 0)
        threads.read([asked.read])
        assert isinstance(asked.ended(), ZeroDivisionError)
    asked = Asked()
    threads.read([asked.read])
    assert asked.ended() is None


def test_an_error_of_the_callback_ends_no_thread(start):
    threads = start(num_threads=2)
    for _ in range(5):
        threads.read([Read(lambda: None, lambda error: 1 // 0)])
    asked = Asked()
    threads.read([asked.read])
    assert asked.ended() is None


def test_what_waits_is_written_after_an_unexpected_error(start):
    """One turn that fails does not leave the rest of the queue until somebody writes again."""
    turns, done = [0], threading.Event()

    def write_some():
        turns[0] += 1
        if turns[0] == 1:
            raise ZeroDivisionError
        done.set()
        return False

    start(write_some).write_soon()
    assert done.wait(SOON_S)


def test_the_disk_is_off_after_three_errors_in_a_row_and_on_again_after_its_rest(start, wait_until):
    reasons = []
    threads = start(on_off=reasons.append, num_threads=2)
    for number in range(3):
        assert not threads.is_off, number
        asked = Asked(refuse)
        threads.read([asked.read])
        assert isinstance(asked.ended(), OSError)
    wait_until(lambda: len(reasons) == 1)
    assert "no" in reasons[0]
    assert threads.breaker.num_trips == 1
    wait_until(lambda: not threads.is_off)
    asked = Asked()
    threads.read([asked.read])
    assert asked.ended() is None
    # It is on for good: it takes three errors again.
    for _ in range(2):
        asked = Asked(refuse)
        threads.read([asked.read])
        asked.ended()
    assert not threads.is_off


def test_writes_that_ask_the_disk_for_nothing_do_not_show_that_it_works(start, wait_until):
    say, turns = [], iter([refuse, lambda: True] * 3 + [lambda: False])
    threads = start(lambda: next(turns, lambda: False)(), on_again=lambda: say.append("on"))
    threads.write_soon()
    wait_until(lambda: threads.breaker.num_trips == 1)
    assert say == []


def test_writes_show_that_the_disk_works(start, wait_until):
    say = []

    def write():
        if threads.breaker.num_trips:
            threads.answered()
            return False
        raise OSError(errno.ENOSPC, "no")

    threads = start(write, on_again=lambda: say.append("on"))
    threads.write_soon()
    wait_until(lambda: say == ["on"] and not threads.is_off)


def test_an_answer_beside_a_call_that_hangs_does_not_show_that_the_disk_works(start, wait_until):
    go, has_answered, said = threading.Event(), threading.Event(), []

    def write():
        wait_until(lambda: threads.breaker.num_trips)
        threads.answered()
        has_answered.set()
        return False

    threads = start(write, timeout_s=0.5, on_again=lambda: said.append("on"))
    threads.read([Asked(lambda: go.wait(SOON_S)).read])
    time.sleep(0.3)  # So that the write is not late itself.
    threads.write_soon()
    assert has_answered.wait(SOON_S)
    assert said == []
    assert threads.is_off
    go.set()


def test_an_error_before_a_good_read_does_not_count_later(start):
    threads = start()
    for _ in range(4):
        for run in (refuse, refuse, lambda: None):
            asked = Asked(run)
            threads.read([asked.read])
            asked.ended()
    assert threads.breaker.num_trips == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ENODEV])
def test_a_disk_that_can_do_nothing_is_off_at_once(start, wait_until, code):
    threads = start()
    asked = Asked(lambda: refuse(code))
    threads.read([asked.read])
    asked.ended()
    wait_until(lambda: threads.breaker.num_trips == 1)


def test_writes_go_on_after_the_rest_without_a_new_call(start, wait_until):
    """Whoever wants to write asks once. The rest's end must not be missed."""
    turns, reasons = [0], []

    def write_some():
        turns[0] += 1
        if turns[0] <= 3:
            refuse()
        return False

    threads = start(write_some, on_off=reasons.append)
    threads.write_soon()
    wait_until(lambda: turns[0] > 3, SOON_S)
    assert len(reasons) == 1


def test_a_hanging_read_turns_the_disk_off_and_fails_those_that_wait(start, wait_until):
    go, reasons = threading.Event(), []
    threads = start(timeout_s=0.1, on_off=reasons.append, num_threads=2)
    hanging = [Asked(lambda: go.wait(SOON_S)) for _ in range(2)]
    waiting = [Asked() for _ in range(3)]
    threads.read([each.read for each in [*hanging, *waiting]])
    assert all(isinstance(each.ended(), DiskUnavailable) for each in waiting)
    assert not any(each.began.is_set() for each in waiting)
    assert threads.is_off
    assert "hangs" in reasons[0]
    with pytest.raises(DiskUnavailable):
        threads.read([Asked().read])
    go.set()
    assert [each.ended() for each in hanging] == [None, None]
    wait_until(lambda: not threads.is_off)
    asked = Asked()
    threads.read([asked.read])
    assert asked.ended() is None


def test_a_disk_that_is_off_because_it_hangs_says_so_before_the_watcher_has_looked(start, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.disk.threads._LOOK_S", 2 * SOON_S)
    let_go = threading.Event()
    threads = start(timeout_s=0.05)
    hanging = Asked(lambda: let_go.wait(SOON_S))
    threads.read([hanging.read])
    wait_until(lambda: threads.is_off)
    assert (threads.reason, threads.breaker.num_trips) == ("the disk hangs: no answer in 0.05 s", 0)
    with pytest.raises(DiskUnavailable, match="the disk hangs"):
        threads.read([Asked().read])
    let_go.set()
    assert hanging.ended() is None


def test_a_hanging_write_turns_the_disk_off(start, wait_until):
    go, reasons = threading.Event(), []
    threads = start(lambda: not go.wait(SOON_S), timeout_s=0.1, on_off=reasons.append)
    threads.write_soon()
    wait_until(lambda: reasons)
    assert threads.is_off
    go.set()
    wait_until(lambda: not threads.is_off)


def test_the_disk_stays_off_as_long_as_a_call_hangs(start, wait_until):
    go = threading.Event()
    threads = start(timeout_s=0.05)
    hanging = Asked(lambda: go.wait(SOON_S))
    threads.read([hanging.read])
    wait_until(lambda: threads.breaker.num_trips >= 3)  # Several rests have passed.
    assert threads.is_off
    go.set()
    assert hanging.ended() is None
    wait_until(lambda: not threads.is_off)


def test_stop_is_bounded_with_a_hanging_call_and_fails_what_waits():
    go = threading.Event()
    threads = DiskThreads(lambda: False, SOON_S, num_threads=2)
    threads.start()
    hanging = [Asked(lambda: go.wait(SOON_S)) for _ in range(2)]
    waiting = Asked()
    threads.read([each.read for each in [*hanging, waiting]])
    assert all(each.began.wait(SOON_S) for each in hanging)
    assert threads.stop(0.1) is False
    assert isinstance(waiting.ended(), DiskUnavailable)
    with pytest.raises(DiskUnavailable):
        threads.read([Asked().read])
    go.set()
    assert threads.stop(SOON_S) is True


def test_stop_before_start():
    assert DiskThreads(lambda: False, 1.0).stop(0.1) is True
