"""examples/serving_job.py, in a process that has a Ray and a store as a job finds them."""

import sys

import pytest

PROGRAM = """
import runpy, ray, kvstore
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, namespace="jobs")
store = kvstore.start("16MiB")
runpy.run_path("examples/serving_job.py", run_name="__main__")
store.stop()
"""


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_each_worker_finds_what_others_have_saved(run_example):
    run = run_example(sys.executable, "-c", PROGRAM, timeout_s=180)
    assert run.returncode == 0, run.stderr
    assert "every byte right: yes" in run.stdout
