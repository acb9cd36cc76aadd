"""Counts of a model with a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """The counts of a `PrefixCachedModel` so far.

    Args:
        num_requests: rows of prompts.
        num_prompt_tokens: tokens of these rows, without padding.
        num_loaded_tokens: how many of those came from the store instead of being computed.
        num_saved_blocks: blocks that were written to the store.
        num_refused_blocks: blocks for which the store had no room.
        num_unsaved_blocks: blocks that were not saved because the cache was not filled with the prompt, token by token.
        num_store_failures: loads and saves that failed.
        num_bypassed: loads and saves that were left out, because of an earlier failure or because other threads held
            the buffer for too long.
        load_s: seconds that loads took, lookup and copies included.
        save_s: seconds that saves took.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_loaded_tokens: int = 0
    num_saved_blocks: int = 0
    num_refused_blocks: int = 0
    num_unsaved_blocks: int = 0
    num_store_failures: int = 0
    num_bypassed: int = 0
    load_s: float = 0.0
    save_s: float = 0.0
