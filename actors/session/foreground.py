"""The foreground of `kvstore start --local`: serve until a signal comes, or the store or its Ray ends."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from kvstore.actors.calls import actor_name, find_actor
from kvstore.actors.session.probing import check_answers
from kvstore.errors import KVStoreError, StoreNotRunning

_LOOKS_EVERY_S = 2.0
#: How long to wait for the end of a Ray that does not answer.
_GRACE_S = 5.0


def serve_until_signal(store: Any, started: Callable[[], str]) -> None:
    """Wait for Ctrl-C, SIGTERM or the end of a store with a local Ray, then stop both.

    Args:
        store: the handle, as `kvstore.start` returned it.
        started: returns the text to print once signals are handled.

    Raises:
        KVStoreError: the store could not be stopped.
    """
    stop = threading.Event()
    try:
        # After the start, because Ray sets its own handlers, which would end this process at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        click.echo(started())
        while not stop.wait(_LOOKS_EVERY_S):
            if end := _end_of(store):
                click.echo(end)
                break
    finally:
        click.echo("stopping", err=True)
        _stop_local(store)


def _end_of(store: Any) -> str:
    """Return how a store with a local Ray has ended; empty while it runs or does not answer."""
    name = store.config.name
    try:
        check_answers(store.address)
    except StoreNotRunning:
        return f"the Ray at {store.address} has ended, and store {name!r} with it"
    try:
        find_actor(actor_name(name, "supervisor"), _GRACE_S)
    except StoreNotRunning:
        return f"store {name!r} was stopped by another process; its Ray ends with it"
    except KVStoreError:
        pass  # Perhaps slow: the caller asks again.
    return ""


def _stop_local(store: Any) -> None:
    """Stop a store with its Ray, and give up if that Ray ends first, as after a signal to the process group."""
    failed: list[KVStoreError] = []
    # Warnings of a Ray that does not answer would only confuse: it is to end. A failure is raised.
    logging.getLogger("kvstore").setLevel(logging.ERROR)

    def run() -> None:
        try:
            store.stop()
        except KVStoreError as error:
            failed.append(error)

    stopping = threading.Thread(target=run, name="raykv-stop", daemon=True)
    stopping.start()
    while stopping.is_alive():
        stopping.join(0.2)
        try:  # With a deadline: an ending Ray may accept a question and not answer it.
            check_answers(store.address, time.monotonic() + _GRACE_S)
        except StoreNotRunning:
            stopping.join(_GRACE_S)
            if stopping.is_alive():
                ended = f"the Ray at {store.address} has ended, too, as after a signal to all processes"
                click.echo(f"{ended}, and store {store.config.name!r} with it", err=True)
                return
    if failed:
        raise failed[0]
