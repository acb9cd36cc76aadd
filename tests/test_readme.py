"""The README's example runs as printed, and its commands exist."""

import os
import re
import subprocess
import sys


def test_the_ten_lines_run(repo_root, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (repo_root / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "readme.py"
    script.write_text(blocks[0])
    ended = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ), capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "LoadResult(num_blocks=4, failed=()" in ended.stdout


def test_its_make_targets_exist(repo_root):
    targets = set(re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", (repo_root / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


def test_its_links_lead_somewhere(repo_root):
    for page in [repo_root / "README.md", *(repo_root / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
