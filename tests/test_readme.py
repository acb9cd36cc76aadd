"""The README's example runs as printed, and its commands exist."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from waiting import eventually, state_of

BEFORE_STOP = """
import ray
same = all(torch.equal(cache[:, 7:11], cache[:, 20:24]) for cache in caches)
pids = ray.get(kvstore.node_store().pids.remote(), timeout=10)
print(same, store.node_ids() == [ray.get_runtime_context().get_node_id()], *pids.values())
"""
AFTER_STOP = """
print(ray.is_initialized())
"""


def lives(pid):
    try:
        return state_of(Path(f"/proc/{pid}")) not in "ZX"
    except OSError:
        return False


@pytest.mark.ray
def test_the_ten_lines_run_with_a_ray_of_their_own_which_ends(repo_root, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (repo_root / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    lines, stop, nothing = blocks[0].partition("store.stop()  # ends what start() started, and nothing else\n")
    assert (stop != "", nothing) == (True, "")
    script = tmp_path / "readme.py"
    script.write_text(lines + BEFORE_STOP + stop + AFTER_STOP)
    # A folder where `ray start` has begun nothing; short, for Ray's sockets lie deep below.
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        ended = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded, before_stop, has_ray = ended.stdout.splitlines()[-3:]
    assert loaded.startswith("LoadResult(num_blocks=4, failed=(), num_local=4,")
    same, alone, store_pid, mover_pid = before_stop.split()
    assert (same, alone, has_ray) == ("True", "True", "False")
    eventually(lambda: not lives(int(store_pid)) and not lives(int(mover_pid)), 10)


def test_its_make_targets_exist(repo_root):
    targets = set(re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", (repo_root / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


def test_make_demo_is_the_example_that_the_tests_run(repo_root):
    # Make tells a make within it its options and ARGS; a user's shell has none of them.
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    said = subprocess.run(
        ["make", "-n", "demo"], cwd=repo_root, env=shell, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.splitlines()[-1].split() == [".venv/bin/python", "examples/prefill_decode.py"]


def anchors_of(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_its_links_lead_somewhere(repo_root):
    for page in [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *(repo_root / "docs").rglob("*.md")]:
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}#{anchor}"
