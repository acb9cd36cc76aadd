"""Bugs in what a store gives to its next life, and in what that makes of it."""

from __future__ import annotations

from poolcheck.mutant import EXPLORER, POOL, Mutant, bug

EXPORT, ADOPTION = "kvstore.pool.handover.export", "kvstore.pool.handover.adoption"
IMAGE, MESSAGE = "kvstore.pool.handover.image", "kvstore.node.handover.message"
HOLDER, OLD_LIFE = "kvstore.node.handover.holder", "kvstore.node.handover.old_life"
GIVING, PROCESSES = "kvstore.node.handover.giving", "kvstore.node.handover.processes"
POOLS = "tests/kvstore/pool/handover/test_handover.py"
MESSAGES, HOLDERS = "tests/kvstore/node/handover/test_message.py", "tests/kvstore/node/handover/test_holder.py"
NEXT_LIFE = "tests/kvstore/node/handover/test_next_life.py"
USERS, RULES = "tests/kvstore/node/handover/test_user_processes.py", "tests/kvstore/node/handover/test_processes.py"
_FROZEN = f"{POOLS}::test_a_frozen_pool_grants_publishes_and_clears_nothing"
_RANKS = f"{POOLS}::test_what_ranks_write_is_held_for_all_of_them_and_free_once_they_have_written"


def _thawed(step: str) -> Mutant:
    lives = "            self._check_lives()\n"
    text = f'        with self._step("{step}"):\n'
    return bug(f"a frozen pool does {step}", "ours", POOL, text + lives, text, _FROZEN)


HANDOVER: tuple[Mutant, ...] = (
    *map(_thawed, ("prepare_store", "reserve", "complete_store", "pin_prefix", "renew", "clear")),
    bug(
        "a pool is frozen in two steps",
        "ours: what is granted between the image and the end of grants is in neither life",
        POOL,
        "            self.is_frozen = True\n            return export(self.table, self.leases, self.writes)\n",
        "            image = export(self.table, self.leases, self.writes)\n"
        '        with self._step("freeze"):\n'
        "            self.is_frozen = True\n            return image\n",
        f"{EXPLORER}[frozen_while_used]",
    ),
    bug(
        "slots of old writers are free",
        "ours: a worker that is late writes into a block of the next life",
        EXPORT,
        "            owners[slot].add(write.owner)\n",
        "            owners.pop(slot, None)\n",
        f"{POOLS}::test_a_slot_that_an_old_writer_has_is_not_used_before_it_is_gone",
        f"{NEXT_LIFE}::test_a_writer_of_the_old_life_harms_no_block_of_the_new_one",
    ),
    bug(
        "slots wait for one rank only",
        "ours",
        EXPORT,
        "            owners[slot].add(write.owner)\n",
        "            owners[slot] = {write.owner}\n",
        _RANKS,
    ),
    bug(
        "abandoned READs are forgotten",
        "ours: a READ of the old mover writes into a block of the next life",
        EXPORT,
        "            owners[slot].add(MOVER)\n",
        "            pass\n",
        f"{POOLS}::test_a_slot_of_a_read_that_was_given_up_and_of_a_cleared_block_that_is_read_are_held",
    ),
    bug(
        "old readers are forgotten",
        "ours: bytes change under a lease that its reader trusts",
        ADOPTION,
        "in enumerate(image.readers):",
        "in enumerate(()):",
        f"{POOLS}::test_a_block_that_is_read_is_found_but_not_evicted_before_its_last_lease_ends",
    ),
    bug(
        "old readers until the first lease ends",
        "ours",
        EXPORT,
        "until_s[slot] = max(until_s.get(slot, -math.inf), end_s)",
        "until_s[slot] = min(until_s.get(slot, math.inf), end_s)",
        f"{POOLS}::test_a_block_that_is_read_is_found_but_not_evicted_before_its_last_lease_ends",
    ),
    bug(
        "one reader of several is named",
        "ours: a slot is used again when the first of its readers has died",
        EXPORT,
        "owners[slot] = {*known, lease.owner}",
        "owners[slot] = own",
        f"{POOLS}::test_all_readers_of_a_block_are_named_with_the_end_of_the_last_and_pins_are_no_readers",
    ),
    bug(
        "two readers of several are named",
        "ours: a slot is used again when the first two of its readers have died",
        EXPORT,
        "known.add(lease.owner)",
        "pass",
        f"{POOLS}::test_all_readers_of_a_block_are_named_with_the_end_of_the_last_and_pins_are_no_readers",
    ),
    bug(
        "a reader without a process counts for nothing",
        "ours: a slot that a caller over Ray reads is used again when another reader has died",
        GIVING,
        "is_named = is_named and len(theirs) > 0 and owner.startswith((OLD_READER, OLD_WRITER))",
        "pass",
        f"{USERS}::test_slots_with_one_reader_that_has_no_process_wait_for_their_time_only",
    ),
    bug(
        "a reader's process that is not known is one that has ended",
        "ours",
        GIVING,
        "is_named = is_named and len(theirs) > 0 and -1 not in theirs and owner not in self._nameless",
        "pass",
        f"{USERS}::test_a_reader_whose_process_cannot_be_named_ends_no_giving_and_its_slots_wait_for_their_time",
    ),
    bug(
        "what is only read is written in the next life but one",
        "ours: slots of a dead reader stay out of use after two restarts",
        GIVING,
        "            if use.is_read:\n",
        "            if False:\n",
        f"{USERS}::test_what_was_only_read_in_the_life_before_still_has_its_processes_and_its_time",
    ),
    bug(
        "the first end of a reader frees",
        "ours",
        PROCESSES,
        "ended >= set(self.pidfds)",
        "not ended.isdisjoint(self.pidfds)",
        f"{RULES}::test_written_slots_wait_for_time_and_processes_and_read_ones_for_the_first",
    ),
    bug(
        "a reader without processes has ended",
        "ours",
        PROCESSES,
        "(len(self.pidfds) > 0 and are_gone)",
        "are_gone",
        f"{RULES}::test_slots_without_processes_wait_for_their_time",
    ),
    bug(
        "slots of writers have the rule of readers",
        "ours",
        PROCESSES,
        "        return is_due and are_gone\n",
        "        return is_due or are_gone\n",
        f"{RULES}::test_written_slots_wait_for_time_and_processes_and_read_ones_for_the_first",
    ),
    bug(
        "generations begin anew",
        "ours",
        ADOPTION,
        "    columns.continue_generations(image.generations)\n",
        "",
        f"{POOLS}::test_generations_go_on",
    ),
    bug(
        "a used pool adopts",
        "ours",
        ADOPTION,
        "table.columns.num_free < table.num_slots or",
        "False or",
        f"{POOLS}::test_a_larger_pool_takes_it_over_and_a_smaller_or_used_one_does_not",
    ),
    bug(
        "one slot for two blocks of an index",
        "ours",
        IMAGE,
        "and len(np.unique(named)) == len(named)",
        "",
        f"{MESSAGES}::test_an_index_that_contradicts_itself_is_refused",
    ),
    bug(
        "no checksum of the index",
        "ours",
        MESSAGE,
        "    if _checksum(payload) != checksum:\n",
        "    if False:\n",
        f"{MESSAGES}::test_a_message_with_one_changed_bit_is_refused",
    ),
    bug(
        "no format of the index",
        "ours",
        MESSAGE,
        "magic != _MAGIC or number != FORMAT",
        "magic != _MAGIC",
        f"{MESSAGES}::test_a_message_of_another_format_is_refused_before_it_is_read",
    ),
    bug(
        "memory is given twice",
        "ours: two stores have one arena",
        HOLDER,
        "            return True\n        except",
        "            self._parcel = given\n            return False\n        except",
        f"{HOLDERS}::test_it_gives_what_it_got_once_and_keeps_nothing",
    ),
    bug(
        "old blocks without the directory",
        "ours: a clearing between two lives is lost",
        OLD_LIFE,
        "        if why:\n            for namespace",
        "        if False:\n            for namespace",
        f"{NEXT_LIFE}::test_without_the_directory_nothing_is_kept",
    ),
)
