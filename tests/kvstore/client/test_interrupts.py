"""Calls of a client that are interrupted anywhere, as by Ctrl-C, leave nothing behind and nothing that goes on.

`RAYKV_ALL_LINES=1` interrupts before every line; without it a sample of them.
"""

import contextlib
import os
import signal
import threading
import time

import pytest
from inner_parts import parts_of
from interrupts import Interrupter

from kvstore.blocks.codec import encode
from kvstore.client.results import MissReason
from kvstore.client.work import Work, in_one_step
from kvstore.errors import JobAbandoned, JobRunning, KVStoreError, RegistrationFailed, StoreBusy
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import AskLookup
from kvstore.runtime.threads.thread_pool import ThreadPool

N = 4
#: Of one operation, in the suite.
LIMIT_S = 2.5
QUICK = {"call_timeout_s": 1.0, "transfer_timeout_s": 2.0, "lease_ttl_s": 2.0, "lease_margin_s": 0.2}


class Place:
    """A node, a client whose calls are interrupted, and another one."""

    def __init__(self, cluster):
        self.cluster, self.core = cluster, cluster.add("a", **QUICK)
        self.here, self.there = cluster.worker("a", 40, 1), cluster.worker("a", 40, 2)
        self.client = self.here.client
        self.known = cluster.hashes(N, 3)
        self.there.save(self.known, range(N))
        self.here.load(self.known, range(N))
        self.seed, self.pins, self.ticket, self.hashes, self.job = 10, [], None, None, None

    def prepare(self, name):
        self.pins.clear()
        self.seed += 1
        self.hashes, self.ticket, self.job = self.cluster.hashes(N, self.seed), None, None
        if name == "fetch":
            self.ticket = self.there.client.publish(list(range(N)))
        elif name in ("publish", "begin_publish"):
            self.ticket = self.client.prepare_ticket(N)

    def run(self, name):
        client, ids = self.client, list(range(N))
        if name == "save":
            self.job = client.save(self.hashes, ids)
        elif name == "load":
            self.job = client.load(self.known, ids)
        elif name == "fetch":
            self.job = client.fetch(self.ticket, ids)
        elif name == "publish":
            client.publish(ids, ticket=self.ticket)
        elif name == "begin_publish":
            self.job = client.begin_publish(ids, ticket=self.ticket).job
        elif name == "lookup":
            client.lookup(self.known)
        elif name == "lease":
            client.lease(self.known, 1.5).release()
        else:
            self.pins.append(client.pin(self.known))
            client.unpin(self.pins[-1])
        if self.job is not None:
            self.job.result(5)

    def left(self):
        """What is left of a call that was interrupted."""
        stats = self.core.pool.stats()
        left = {
            "jobs": len(parts_of(self.client).threads),
            "written": stats.num_writing,
            "pinned": stats.num_hard_pinned,
            "fetches": self.core.stats()["num_handoff_fetches"],
        }
        return {name: number for name, number in left.items() if number}

    def check(self, name, where, wait_until):
        assert self.job is None or self.job.done() or self.job.abandon(20), where
        # The blocks are the caller's again: nothing reads or writes what is there from now on.
        for layer, cache in enumerate(self.here.caches):
            cache[:, :N] = self.seed + 100.0 * layer
        for pinned in self.pins:
            self.client.unpin(pinned)
        assert self.client.unpin(self.client.pin(self.known)), where
        if self.ticket is not None:
            owner = self.there if name == "fetch" else self.here
            owner.client.withdraw(self.ticket)
        try:
            wait_until(lambda: not self.left(), 4.0)
        except AssertionError:
            pytest.fail(f"{name} interrupted before {where}: left {self.left()}")
        for layer, cache in enumerate(self.here.caches):
            assert bool((cache[:, :N] == self.seed + 100.0 * layer).all()), f"{name} went on: {where}"
        if name == "save":
            loaded = self.there.load(self.hashes, range(20, 20 + N))
            for i in range(loaded.num_blocks):
                assert self.there.block(20 + i) == self.saved[i], f"{name} went on: {where}"

    def refill(self):
        """Give the blocks the bytes that a save or publication may deliver."""
        for layer, cache in enumerate(self.here.caches):
            cache[:, :N] = 7.0 + layer
        self.saved = [self.here.block(i) for i in range(N)]


# A connection that is lost where it is made is closed when it is collected.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["publish", "begin_publish", "fetch", "save", "load", "pin", "lookup", "lease"])
def test_an_interrupt_anywhere_leaves_nothing(cluster, wait_until, name):
    place = Place(cluster)
    is_whole, began_s = os.environ.get("RAYKV_ALL_LINES") == "1", time.monotonic()
    place.prepare(name)
    place.refill()
    with Interrupter(1 << 30) as counting:
        place.run(name)
    num_lines = (1 << 30) - counting._left
    place.check(name, "its end", wait_until)
    # Spread over all of it, in an order that goes through it again and again, more closely each time.
    order = range(1, num_lines + 1) if is_whole else [1 + i * 89 % num_lines for i in range(num_lines)]
    for at in order:
        if not is_whole and time.monotonic() > began_s + LIMIT_S:
            break
        place.prepare(name)
        place.refill()
        with Interrupter(at) as interrupter, contextlib.suppress(KeyboardInterrupt):
            place.run(name)
        if interrupter.where:
            place.check(name, interrupter.where, wait_until)
    place.client.close()
    wait_until(lambda: place.core.pool.stats().num_writing == 0)
    wait_until(lambda: place.core.pool.num_leases() == 0 or name == "lease")


@pytest.mark.parametrize("name", ["begin_publish", "publish", "save", "load", "fetch"])
def test_a_start_that_is_interrupted_waits_for_its_copy_and_delivers_nothing(cluster, wait_until, name, monkeypatch):
    """The job is queued already, and its copy runs or is about to."""
    place = Place(cluster)
    place.prepare(name)
    place.refill()
    copier, running = parts_of(place.client).copier, []
    verb = "out_of_slots" if name in ("load", "fetch") else "into_slots"
    copy = getattr(copier, verb)

    def slowly(*args):
        running.append("begun")
        time.sleep(0.3)
        copy(*args)
        running.append("ended")

    monkeypatch.setattr(copier, verb, slowly)
    with Interrupter(1, "submit", "return job") as interrupter, pytest.raises(KeyboardInterrupt):
        place.run(name)
    assert interrupter.where
    assert len(running) in (0, 2), "no copy runs any more"
    ended = list(running)
    place.check(name, interrupter.where, wait_until)
    assert running == ended
    if name in ("begin_publish", "publish"):
        assert place.there.client.fetch(place.ticket, range(N), timeout_s=0.5).result(5).num_blocks == 0


def test_signals_at_random_moments_leave_the_connection_of_calls_as_it_was(cluster, wait_until):
    place = Place(cluster)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 3e-6 * number)
                try:
                    for _ in range(100):
                        place.client.lease(place.known, 1.0).release()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            assert len(place.client.lease(place.known, 1.0)) == N
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_question_from_within_another_one_of_the_same_thread_is_refused(cluster):
    """As a signal's handler asks it: answers would be mixed up, and to wait for the other one would be for ever."""
    place, refused = Place(cluster), []

    def ask():
        with pytest.raises(StoreBusy, match="one question at a time"):
            place.client.pin(place.known)
        refused.append(1)

    question = encode(AskLookup(parts_of(place.client).chain(place.known), 1.0, 0.0))
    answer = parts_of(place.client).store.call(Op.LOOKUP, question, ask)
    assert refused
    assert answer
    assert place.client.unpin(place.client.pin(place.known))


def test_others_have_their_turn_in_order(cluster):
    place, done = Place(cluster), []

    def ask():
        for _ in range(200):
            place.client.unpin(place.client.pin(place.known))
        done.append(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 4
    assert place.core.pool.num_leases() == 0


@pytest.mark.parametrize("text", ["self._is_told = True", "self._tell()", "self._steps = None"])
def test_a_fetch_is_not_run_again_after_an_interrupt_at_its_end(cluster, wait_until, text):
    place = Place(cluster)
    place.client.fetch(place.there.client.publish(range(N)), range(N)).result(5)
    wait_until(lambda: len(parts_of(place.client).store.for_fetches))
    place.prepare("fetch")
    job = place.client.fetch(place.ticket, range(N), timeout_s=2)
    called = []
    job.add_done_callback(called.append)
    with Interrupter(1, text=text) as interrupter:
        try:
            job.result(5)
        except KeyboardInterrupt:
            assert interrupter.where
    assert job.result(5).num_blocks == N
    wait_until(lambda: called == [job] and not place.left())


def test_a_fetch_that_is_interrupted_where_it_tells_its_failure_is_over_for_the_store(cluster, monkeypatch, wait_until):
    """The answer has been heard to its end by then, so that nothing else closes the connection."""
    cluster.add("a", lease_ttl_s=60.0)
    source, target = cluster.worker("a", 8, 1).client, cluster.worker("a", 8, 2).client
    target.fetch(source.publish(range(N)), range(N)).result(5)
    wait_until(lambda: len(parts_of(target).store.for_fetches))
    (connection,) = parts_of(target).store.for_fetches.idle

    def refuse(*_):
        raise RegistrationFailed("of this test")

    def publish():
        wait_until(lambda: job._work._taker is not None)  # The thread that waits for it: before that it is parked.
        source.publish(range(N), ticket=ticket)

    monkeypatch.setattr(parts_of(target).copier, "out_of_slots", refuse)
    ticket = target.prepare_ticket(N)
    job = target.fetch(ticket, range(N), timeout_s=10)
    publishing = threading.Thread(target=publish, daemon=True)
    publishing.start()
    with Interrupter(1, "failing_closed", "connection.send(") as interrupter, pytest.raises(KeyboardInterrupt):
        job.result(10)
    assert interrupter.where
    publishing.join(5)
    # Long before the lease of the failed one has run out.
    again = cluster.worker("a", 8, 3).client.fetch(ticket, range(N), timeout_s=5).result(5)
    assert (again.num_blocks, connection.closed) == (N, True)


def test_work_whose_taker_is_interrupted_goes_on_elsewhere(wait_until):
    left, work = [], Work(lambda: in_one_step(lambda: 5), 60.0)
    work.left_elsewhere = lambda: left.append(work.go_on(lambda awaited: None))
    with Interrupter(1, "do", "while ("), pytest.raises(KeyboardInterrupt):
        work.do()
    assert left == [True]
    assert work.future.result(0) == 5


def test_abandoning_wakes_the_thread_that_waits_for_the_result(cluster):
    place, results = Place(cluster), []
    ticket = place.client.prepare_ticket(N)
    place.client.fetch(place.there.client.publish(range(N)), range(N)).result(5)
    job = place.client.fetch(ticket, range(N), timeout_s=40)
    thread = threading.Thread(target=lambda: results.append(job.result(None)))
    thread.start()
    time.sleep(0.1)  # It waits by now, on whichever thread.
    assert job.abandon(1.0)
    thread.join(20)
    assert results[0].failed[0].reason is MissReason.ABANDONED


def test_a_result_is_waited_for_no_longer_than_asked_for(cluster, wait_until):
    """The store answers late, and by its own time; the job goes on elsewhere."""
    place = Place(cluster)
    place.client.fetch(place.there.client.publish(range(N)), range(N)).result(5)
    wait_until(lambda: len(parts_of(place.client).store.for_fetches))
    job = place.client.fetch(place.client.prepare_ticket(N), range(N), timeout_s=20)
    job._work.limit_s = 0.05  # As when the store does not keep to it.
    with pytest.raises(JobRunning):
        job.result(0.1)
    assert job.abandon(1.0)
    assert job.result(10).failed[0].reason is MissReason.ABANDONED


def test_a_job_that_was_abandoned_before_it_had_begun_says_so(cluster, wait_until):
    place = Place(cluster)
    place.client.fetch(place.there.client.publish(range(N)), range(N)).result(5)
    wait_until(lambda: len(parts_of(place.client).store.for_fetches))
    job = place.client.fetch(place.client.prepare_ticket(N), range(N), timeout_s=3)
    assert job.abandon(1.0)
    with pytest.raises(JobAbandoned, match="before it had begun") as caught:
        job.result(5)
    assert isinstance(caught.value, KVStoreError)


def test_an_awaited_job_that_was_abandoned_before_it_had_begun_says_so(cluster, wait_until):
    import asyncio

    place = Place(cluster)
    place.client.fetch(place.there.client.publish(range(N)), range(N)).result(5)
    wait_until(lambda: len(parts_of(place.client).store.for_fetches))
    job = place.client.fetch(place.client.prepare_ticket(N), range(N), timeout_s=3)
    assert job.abandon(1.0)

    async def wait():
        await job

    with pytest.raises(JobAbandoned):
        asyncio.run(wait())


def test_a_thread_whose_start_was_interrupted_works_all_the_same(monkeypatch):
    pool, ran, start = ThreadPool(2, "raykv-test"), threading.Event(), threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("raykv-test"):  # Another pool may be collected meanwhile, and start one, too.
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(ran.set)
    monkeypatch.undo()
    assert pool.run(ran.set)
    assert ran.wait(20)
    pool.close(wait=True)
    assert not pool.threads
