"""Bugs in what becomes of slots: claiming, writing in parts, publishing, evicting, clearing."""

from __future__ import annotations

from poolcheck.mutant import (
    EXPLORER,
    GAP,
    LINES,
    MODEL,
    PART_RUNS,
    POOL,
    POOL_WRITES,
    PRESENCE,
    PRESENCE_RULES,
    RUN_RULES,
    RUNS,
    SLOTS,
    STALE,
    WRITES,
    Mutant,
    bug,
)
from poolcheck.patch import Patch

BLOCKS = (
    Mutant(
        name="no lock",
        source="TensorRT-LLM: LRU lists shared by two threads",
        patches=(Patch(POOL, "with self._lock:", "if True:", everywhere=True),),
        tests=(f"{LINES}[claim_pin_evict]",),
    ),
    Mutant(
        name="two-step unpin",
        source="TensorRT-LLM: drop ref, has refs, release",
        patches=(
            GAP,
            Patch(
                SLOTS,
                "        self.num_pinned -= self._num_idle(slots)\n",
                ("        self.num_pinned -= self._num_idle(slots)\n        self.gap()\n"),
            ),
        ),
        tests=(f"{EXPLORER}[readers_of_a_cleared_block]",),
    ),
    Mutant(
        name="peek, then claim",
        source="TensorRT-LLM: a victim is pinned before it is taken",
        patches=(
            GAP,
            Patch(
                SLOTS,
                "                # At once: the order may name this slot twice, and nobody must get it twice.\n",
                "                self.gap()\n",
            ),
        ),
        tests=(f"{EXPLORER}[claim_pin_evict]",),
    ),
    Mutant(
        name="free slots peeked at",
        source="TensorRT-LLM: one free block for two takers",
        patches=(
            GAP,
            Patch(
                SLOTS,
                "        claimed = free[: -wanted - 1 : -1]\n",
                ("        claimed = free[: -wanted - 1 : -1]\n        self.gap()\n"),
            ),
        ),
        tests=(f"{EXPLORER}[two_writers]",),
    ),
    Mutant(
        name="no re-check after the copy",
        source="TensorRT-LLM: onboard swaps what was pinned meanwhile",
        patches=(
            Patch(WRITES, "if table.doomed and not table.doomed.isdisjoint(slots):", "if False:"),
            Patch(
                SLOTS,
                ("        for own in hashes:\n            del writing[own]\n"),
                ("        self.doomed -= set(slots)\n        for own in hashes:\n            writing.pop(own, None)\n"),
            ),
        ),
        tests=(f"{EXPLORER}[write_clear_read]",),
    ),
    bug(
        "publish before the copy",
        "LMCache: failed stores stay visible",
        POOL,
        "            return self._writes.prepare(chain, hashes, terms, needs_parent=needs_parent)\n",
        (
            "            ticket = self._writes.prepare(chain, hashes, terms, needs_parent=needs_parent)\n"
            "            if ticket.write_id and num_parts == 1:\n"
            "                self._writes.complete(\n"
            "                    ticket.write_id, self._writes.find(ticket.write_id, owner, None, None), None\n"
            "                )\n"
            "            return ticket\n"
        ),
        f"{EXPLORER}[duplicates]",
    ),
    Mutant(
        name="free on cancel",
        source="NIXL: a released handle still writes",
        patches=(
            Patch(WRITES, "aside=bool(quarantine)", "aside=False"),
            Patch(WRITES, "        if quarantine and pending:\n", "        if False:\n"),
        ),
        tests=(f"{EXPLORER}[cancelled_transfer]",),
    ),
    bug(
        "no generation",
        "Dynamo, NIXL: old descriptors read new blocks",
        SLOTS,
        "        self._generations[run.whole.index] += 1\n",
        "",
        f"{STALE}::test_every_life_of_a_slot_has_a_number",
    ),
    bug(
        "double release frees a neighbour",
        "TensorRT-LLM: two trackers of one pin",
        SLOTS,
        "refs += number\n",
        "refs += number if number > 0 else -refs\n",
        f"{EXPLORER}[two_readers_and_eviction]",
    ),
    bug(
        "a run that outlives its blocks",
        "ours: what a claim remembers of its blocks is not what the index has",
        SLOTS,
        "            run.lost(self.place[slot])\n",
        "            pass\n",
        MODEL,
    ),
    bug(
        "a run that knows blocks before they are ready",
        "ours: what a claim remembers of its blocks is not what the index has",
        RUNS,
        "        if self.slots[self.num_ready : end] == slots:\n",
        "        if True:\n",
        f"{RUN_RULES}::test_blocks_that_were_published_out_of_order_are_not_known",
    ),
    bug(
        "published and said to be absent",
        "ours: what says at once that a chain is not here does not count what is",
        SLOTS,
        "            self.presence.add(hashes[0])\n",
        "            pass\n",
        f"{EXPLORER}[write_clear_read]",
    ),
    bug(
        "evicted and counted on",
        "ours: what says at once that a chain is not here goes on to count what is not",
        SLOTS,
        "            self.presence.drop(self.block_hash[slot])\n",
        "            pass\n",
        f"{EXPLORER}[claim_pin_evict]",
    ),
    bug(
        "a counter that was full goes down",
        "ours: chains that did not fit its counter are said to be absent",
        PRESENCE,
        "        if self._counters[at] < FULL:\n            self._counters[at] -= 1\n",
        "        self._counters[at] -= 1\n",
        f"{PRESENCE_RULES}::test_a_counter_that_was_full_says_present_for_ever",
    ),
    bug(
        "equal in the first words only",
        "ours: a block of another chain taken for the one that was asked for",
        RUNS,
        "        return int((ours != theirs).argmax()) // _WORDS\n",
        "        return most\n",
        f"{RUN_RULES}::test_a_prefix_is_that_of_block_by_block",
    ),
    Mutant(
        name="evict the root first",
        source="SGLang, LightLLM: prefixes with holes",
        patches=(
            Patch(SLOTS, "if ref_count[slot] or num_children[slot] or space", "if ref_count[slot] or space"),
            Patch("kvstore.pool.eviction", "slot = current.pop()", "slot = current.pop(0)"),
        ),
        tests=(MODEL,),
    ),
    bug(
        "clear misses what is being written",
        "engines: KV of old weights after an update",
        WRITES,
        "        if write.space.is_cleared:\n",
        "        if False:\n",
        f"{EXPLORER}[write_clear_read]",
    ),
    bug(
        "clear frees what is read",
        "LMCache: memory freed under a transfer",
        SLOTS,
        "        if is_read.any():\n",
        "        if False:\n",
        f"{EXPLORER}[clear_under_reader]",
    ),
    bug(
        "half-visible parts",
        "LightLLM: ready before every rank has copied",
        PART_RUNS,
        "(parts.num_done[stretch] == parts.num_parts) & done",
        "(parts.num_done[stretch] > 0) & done",
        f"{EXPLORER}[two_ranks]",
    ),
    Mutant(
        name="a dead rank's block goes on",
        source="LightLLM: ready before every rank has copied",
        patches=(
            Patch(PART_RUNS, "parts.num_done[stretch] += int(done)", "parts.num_done[stretch] += 1"),
            Patch(WRITES, "        self.doom(pending)\n        if write.segments:\n", "        if write.segments:\n"),
        ),
        tests=(f"{EXPLORER}[a_rank_dies]",),
    ),
    bug(
        "a second copy",
        "LMCache: one chunk stored by every worker",
        WRITES,
        "if writing and not writing.keys().isdisjoint(hashes):",
        "if False:",
        f"{EXPLORER}[duplicates]",
    ),
    bug(
        "eviction without an event",
        "LMCache, Dynamo: routers send to blocks that are gone",
        SLOTS,
        "            self._tell(False, hashes)\n",
        "",
        f"{EXPLORER}[two_writers_one_victim]",
    ),
    bug(
        "part counted twice",
        "LightLLM: ready before every rank has copied",
        PART_RUNS,
        "        if came is None:\n",
        "        if True:\n",
        f"{POOL_WRITES}::test_the_same_part_twice_or_another_number_of_parts_waits",
    ),
    bug(
        "ranks that do not agree on the parts",
        "LightLLM: ready before every rank has copied",
        PART_RUNS,
        "if parts is None or parts.num_parts != num_parts:",
        "if parts is None:",
        f"{POOL_WRITES}::test_the_same_part_twice_or_another_number_of_parts_waits",
    ),
    bug(
        "a lost block's slot is free while another rank writes",
        "ours",
        PART_RUNS,
        "and parts.is_open[place] and not parts.num_writers[place]:",
        "and parts.is_open[place]:",
        f"{EXPLORER}[a_rank_dies]",
    ),
    bug(
        "a rank that never comes is waited for for ever",
        "LMCache: half-written memory is never given back",
        PART_RUNS,
        "            if parts.deadline_s < now_s:\n",
        "            if False:\n",
        f"{POOL_WRITES}::test_a_rank_that_never_comes_is_waited_for_until_the_deadline",
    ),
    bug(
        "those who wait do not hear of a write that is lost",
        "ours",
        WRITES,
        "        if lost:\n            self._on_settled(lost, False)\n",
        "",
        f"{POOL_WRITES}::test_a_watch_tells_when_a_writer_gives_up_and_the_next_takes_over",
    ),
    bug(
        "those who wait do not hear of a clearing",
        "ours",
        WRITES,
        "        if space.writing:\n            self._on_settled(space.writing, False)\n",
        "",
        f"{POOL_WRITES}::test_a_clearing_ends_the_waiting_for_it_and_is_counted",
    ),
    bug(
        "those who wait take a lost block for a stored one",
        "LMCache: failed stores stay visible",
        "kvstore.pool.watches",
        "                if not published:\n                    watch.lost.add(own)\n",
        "",
        f"{POOL_WRITES}::test_a_watch_counts_up_to_the_first_lost_block",
    ),
    bug(
        "those who wait are told twice",
        "ours",
        "kvstore.pool.watches",
        "        watch = self._watches.pop(watch_id)\n",
        "        watch = self._watches[watch_id]\n",
        f"{POOL_WRITES}::test_a_watch_that_ends_early_counts_nothing_unfinished",
    ),
)
