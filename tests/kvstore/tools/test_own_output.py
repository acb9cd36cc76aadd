"""The standard output of a command has nothing that other threads print."""

from __future__ import annotations

import io
import sys
import threading

import click

from kvstore.tools.own_output import keep_own_output


def test_what_another_thread_prints_goes_to_standard_error(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    keep_own_output()
    keep_own_output()
    click.echo("{")
    other = threading.Thread(target=lambda: print("(raylet) a node died", flush=True))  # noqa: T201
    other.start()
    other.join(10)
    print("}")  # noqa: T201
    assert [stream.buffer.getvalue() for stream in streams] == [b"{\n}\n", b"(raylet) a node died\n"]
