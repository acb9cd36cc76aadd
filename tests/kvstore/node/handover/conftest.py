"""A process that does nothing, for the tests of what waits until a process has ended."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def process():
    """A process with its `pidfd`; both end with the test."""
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    made.pidfd = os.pidfd_open(made.pid)
    yield made
    made.kill()
    made.wait(10)
    os.close(made.pidfd)
