"""Every figure of the documentation can be traced: its result file has commit and hardware, and the page names both."""

from __future__ import annotations

import json
import re

NEAR = 150  # characters between a file and its commit


def commit_of(found):
    """A file of turns between two versions has two; the page names the newer one."""
    return (found.get("commit") or found.get("provenance", {}).get("commit") or {"id": found["commits"]["new"]})["id"]


def test_every_result_has_its_commit_and_hardware(repo_root):
    for path in (repo_root / "benchmarks/results").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert re.fullmatch(r"[0-9a-f]{40}", commit_of(found)), path.name
        assert (found.get("hardware") or found["provenance"]["hardware"])["num_cores"] > 0, path.name


def test_a_page_names_the_commit_of_every_result_that_it_shows(repo_root):
    pages = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *(repo_root / "docs").rglob("*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for mention in re.finditer(r"benchmarks/results/([\w-]+\.json)", text):
            found = json.loads((repo_root / mention[0]).read_text(encoding="utf-8"))
            around = " ".join(text[max(0, mention.start() - NEAR) : mention.end() + NEAR].split())
            assert f"commit {commit_of(found)[:7]}" in around, f"{page.name}: {mention[1]}"
