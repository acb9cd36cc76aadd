"""docs/replay.md: its figures are those of made traces; it names every policy, format, kind, option and column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_traces import trace_of

from kvstore.replay.commands import replay
from kvstore.replay.formats import FORMATS
from kvstore.replay.kinds import KINDS, make_requests
from kvstore.replay.model import LOAD_GB_PER_S, PREFILL_TOKENS_PER_S, TOKEN_BYTES, Rates
from kvstore.replay.report import POLICIES, Plan, run_plan

PAGE = (Path(__file__).resolve().parents[3] / "docs/replay.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistics_of_a_kind(kind):
    rows = make_requests(kind, 1800.0, 0)
    seen, num_references, num_seen = set(), 0, 0
    for row in rows:
        num_references += len(row.ids)
        num_seen += sum(each in seen for each in row.ids)
        seen.update(row.ids)
    tokens = sorted(row.input_tokens for row in rows)
    answers = sorted(row.output_tokens for row in rows)
    cells = (
        f"`{kind}`",
        f"{len(rows) / 1800:.2f}",
        f"{tokens[len(tokens) // 2]:,} / {tokens[int(len(tokens) * 0.99)]:,}",
        f"{answers[len(answers) // 2]:,}",
        f"{num_references:,}",
        f"{len(seen):,}",
        f"{num_seen / num_references:.2f}",
    )
    assert f"| {' | '.join(cells)} |" in PAGE


def test_everything_has_a_line():
    options = [name for parameter in replay.params for name in parameter.opts if name.startswith("--")]
    rows = run_plan(trace_of([1]), Plan(["lru"], [1], 2), Rates(1.0, 1.0, 1), lambda _: lambda: None)
    tiers = Plan(["lru"], [2], 2, disk_blocks=2, restart_at=1)
    rows += run_plan(trace_of([1], [1]), tiers, Rates(1.0, 1.0, 1), lambda _: lambda: None)
    for name in (*POLICIES, *FORMATS, *KINDS, *rows[0], *rows[1]):
        assert f"`{name}`" in PAGE, name
    for option in options:
        assert option in PAGE or option == "--mode", option


def test_defaults_of_the_model():
    defaults = {parameter.name: parameter.default for parameter in replay.params}
    assert defaults["prefill_tokens_per_s"] == PREFILL_TOKENS_PER_S
    assert defaults["load_gb_per_s"] == LOAD_GB_PER_S
    assert f"`--prefill-tokens-per-s` | {PREFILL_TOKENS_PER_S:,.0f} |" in PAGE
    assert f"`--load-gb-per-s` | {LOAD_GB_PER_S:g} |" in PAGE
    assert f"`--block-bytes` | {TOKEN_BYTES >> 10} KiB for each token" in PAGE


def test_the_tokens_of_a_block():
    for name, tokens in FORMATS.items():
        assert re.search(rf"^\| `{name}` \|.*\b{tokens} \|$", PAGE, re.MULTILINE)
