"""docs/paged.md: its example runs, and it names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.request import PagedRequest

PAGE = (Path(__file__).resolve().parents[3] / "docs/paged.md").read_text(encoding="utf-8")


def test_the_examples_run():
    examples = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if text.startswith("from kvstore")]
    assert len(examples) == 2
    for text in examples:
        exec(text, {})


def test_every_verb_is_on_the_page():
    verbs = {name for cls in (PagedPrefixCache, PagedRequest) for name in vars(cls) if not name.startswith("_")}
    unnamed = {"num_requests", "num_nodes", "is_released", "private_pages", "page_size"}
    missing = {name for name in verbs - unnamed if f"{name}" not in PAGE}
    assert missing == set()
