"""Streams of our own end with what refers to them, and leave an interpreter behind that can end, too."""

import gc
import subprocess
import sys

import pytest
import torch

from kvstore.kernels import streams

pytestmark = pytest.mark.gpu

#: Streams that ended, and whatever comes to lie where they were.
PROCESS = """
import torch
from kvstore.kernels.streams import own_stream

torch.cuda.init()
device = torch.device("cuda", 0)
for _ in range(300):
    own_stream(device).synchronize()
kept = [bytes([65]) * size for size in range(1, 480) for _ in range(100)]
print("done")
"""


def test_a_stream_ends_when_nothing_refers_to_it(monkeypatch):
    torch.cuda.init()
    ended, destroy = [], streams._destroy
    monkeypatch.setattr(streams, "_destroy", lambda handle, index: (ended.append(handle), destroy(handle, index)))
    stream = streams.own_stream(torch.device("cuda", 0))
    handle, again = stream.cuda_stream, stream
    del stream
    gc.collect()
    assert ended == []
    again.synchronize()
    del again
    gc.collect()
    assert ended == [handle]


def test_a_process_that_used_streams_ends_without_a_fault():
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
