"""Bugs in clearing: what is old and stays, what is old and comes back."""

from __future__ import annotations

from poolcheck.mutant import CLEARING, COLUMNS, EXPLORER, INDEX, POOL, SLOTS, SWEEPING, VERSIONS, Mutant, bug

CLEARINGS: tuple[Mutant, ...] = (
    bug(
        "a save is of the version that its thread finds",
        "ours: the count was taken with the first question",
        "kvstore.client.save",
        "copier, asked, pages,",
        "copier, Prepare(chain, part.num_parts, part.index, attached.clears.get(chain.namespace)), pages,",
        f"{CLEARING}::test_a_save_that_waits_for_a_thread_while_its_namespace_is_cleared_stores_nothing",
    ),
    bug(
        "a rank's part is of the version that its thread finds",
        "ours: parts of old and of new weights became one block",
        "kvstore.client.save",
        "copier, asked, pages,",
        "copier, Prepare(chain, part.num_parts, part.index, attached.clears.get(chain.namespace)), pages,",
        f"{CLEARING}::test_parts_of_one_block_are_of_one_version_or_it_is_not_stored",
    ),
    bug(
        "old blocks claim slots",
        "ours",
        POOL,
        "if num_clears is not None and num_clears != self._clears.get(chain.namespace):",
        "if False:",
        f"{CLEARING}::test_parts_of_one_block_are_of_one_version_or_it_is_not_stored",
    ),
    bug(
        "a clearing is not counted",
        "ours",
        POOL,
        "            self._clears.add(namespace)\n",
        "",
        f"{CLEARING}::test_a_save_that_waits_for_a_thread_while_its_namespace_is_cleared_stores_nothing",
    ),
    bug(
        "blocks are evicted while cleared ones take room",
        "ours",
        SLOTS,
        "        while cleared and columns.num_free < wanted and self.sweep(wanted - columns.num_free):\n",
        "        while False:\n",
        f"{SWEEPING}::test_a_claim_that_is_short_of_slots_takes_what_was_cleared_and_evicts_nothing",
    ),
    bug(
        "what is swept and read is freed",
        "LMCache: memory freed under a transfer",
        COLUMNS,
        "            slots = index[~is_read].tolist()\n",
        "",
        f"{EXPLORER}[clear_in_pieces]",
    ),
    bug(
        "what was cleared is counted on",
        "ours: what says at once that a chain is not here goes on to count what is not",
        INDEX,
        "                    self.presence.drop(self.block_hash[slot])\n",
        "                    pass\n",
        f"{EXPLORER}[clear_in_pieces]",
    ),
    bug(
        "an older clearing is dropped without a word",
        "ours: versions were the callers' clocks",
        VERSIONS,
        "            if version <= known:\n",
        "            if version <= known:\n                return version\n            if version <= known:\n",
        "tests/kvstore/remote/test_versions.py::test_only_later_clearings_are_news",
    ),
    bug(
        "versions are the callers' clocks",
        "ours: a caller two seconds behind cleared nothing",
        "kvstore.actors.clearing",
        "    return max(known.values()) + 1, ",
        "    return __import__('time').time_ns() >> 32, ",
        "tests/actors/test_clearing.py::test_every_clearing_takes_effect_whatever_clocks_say",
    ),
    bug(
        "a version may be any number",
        "ours: one of 2**64 - 1 ended clearing for ever",
        VERSIONS,
        "not 0 <= version <= known + _MAX_AHEAD",
        "False",
        "tests/kvstore/remote/test_versions.py::test_what_is_no_next_version_is_refused_and_clearing_goes_on",
    ),
)
