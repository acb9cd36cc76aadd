"""Start a job on a client's threads, and end one whose start was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.client.attachment import Attachment
from kvstore.client.job import Job
from kvstore.client.job_threads import JobThreads
from kvstore.client.work import CopyGuard, Work

#: A running copy is waited for in turns of this length.
_CALL_OFF_S = 5.0


def submit(
    attached: Attachment, work: Work[Any], what: str, guard: CopyGuard, start: Callable[[Work[Any]], None] | None = None
) -> Job[Any]:
    """Start a job and return it.

    After an error, no copy of the job touches the engine's blocks, and the job gives back what it holds.

    Args:
        attached: the client's attachment; the work's steps refer to it.
        work: the job's work.
        what: names the job in messages.
        guard: asked before its copies.
        start: starts it; None for the copying threads.
    """
    threads, order = attached.threads, guard.order

    def abandon(timeout_s: float) -> bool:
        is_given_up = guard.abandon(timeout_s)
        threads.wake(work)
        return is_given_up

    try:
        # Made before the start: a later interrupt has to end it.
        wait_on = order.wait_on if order is not None else None
        job: Job[Any] = Job(work.future, what, abandon, wait_on, work, threads.call)
        if order is not None:
            work.future.add_done_callback(lambda _: order.end())
        attached.store.check_open()
        (start or threads.start)(work)
        return job
    except BaseException:
        call_off(threads, work, guard)
        raise


def call_off(threads: JobThreads, work: Work[Any], guard: CopyGuard) -> None:
    """End work, however far its start came; it no longer touches the engine's blocks.

    It may have ended already. The work itself gives back what it holds, because it may use that until its end.
    """
    work.is_called_off = True
    work.future.cancel()
    is_given_up = guard.abandon(0.0)
    threads.wake(work)
    threads.settle(work)
    while not is_given_up and not work.future.done():  # A copy must end before the caller continues.
        is_given_up = guard.abandon(_CALL_OFF_S)
