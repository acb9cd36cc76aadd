"""For the tests of hand-overs: a folder of sockets for each test, and processes that do nothing."""

import contextlib
import os
import subprocess
import sys
import tempfile

import pytest


@pytest.fixture(autouse=True)
def own_sockets(monkeypatch):
    """A holder whose memory nobody took waits for some time, and the next test's store must not meet it."""
    with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as folder:
        monkeypatch.setenv("RAYKV_SOCKET_DIR", folder)
        yield


@pytest.fixture
def process():
    """A process with its `pidfd`; both end with the test."""
    with _sleeping() as made:
        yield made


@pytest.fixture
def other():
    """A second one."""
    with _sleeping() as made:
        yield made


@contextlib.contextmanager
def _sleeping():
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    made.pidfd = os.pidfd_open(made.pid)
    yield made
    made.kill()
    made.wait(10)
    os.close(made.pidfd)
