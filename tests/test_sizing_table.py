"""docs/directory.md, how many shards: every row follows from the run that the page names."""

from __future__ import annotations

import json
import re

import pytest

from kvstore.config import MAX_SHARDS
from kvstore.remote.index.directory_index import MAX_ENTRIES

BLOCKS_OF_A_SHARD = MAX_ENTRIES // 2


@pytest.fixture
def page(repo_root):
    return (repo_root / "docs/directory.md").read_text(encoding="utf-8")


@pytest.fixture
def run(repo_root):
    return json.loads((repo_root / "benchmarks/results/directory-cpu-2core.json").read_text(encoding="utf-8"))


def test_each_row_follows_from_the_run(page, run):
    section = page.partition("### How many shards")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| \d.*\|$", section, re.M)]
    assert rows
    for nodes, each, blocks, memory, shards, of_each, fill in rows:
        num_blocks, num_shards = number(blocks), number(shards)
        assert number(nodes) * number(each) == num_blocks
        assert num_shards == max(1, -(-num_blocks // BLOCKS_OF_A_SHARD)) <= MAX_SHARDS
        num_gb = num_blocks * run["bytes_per_entry"] / 1e9
        assert (memory, of_each) == (f"{num_gb:.1f} GB", f"{num_gb / num_shards:.1f} GB")
        assert fill == f"{num_blocks / num_shards / run['entries_per_s']:.0f} s"


def test_the_figures_that_it_names_are_those_of_the_run(page, run):
    section = page.partition("### How many shards")[2].partition("\n## ")[0]
    told = (f"{run['bytes_per_entry']} bytes", f"{run['entries_per_s']:,} blocks", f"{run['num_nodes']} nodes",
            f"{run['num_blocks_per_node']:,} blocks", f"{BLOCKS_OF_A_SHARD:,}", f"{MAX_ENTRIES:,}")  # fmt: skip
    assert [figure for figure in told if figure not in " ".join(section.split())] == []


def number(text):
    return int(text.replace(",", ""))
