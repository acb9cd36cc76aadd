"""Bugs in what becomes of hand-offs: who may still write to their slots, and who hears of their end."""

from __future__ import annotations

from poolcheck.mutant import EXPLORER, Mutant, bug
from poolcheck.patch import Patch

_TABLE, _WRITERS = "kvstore.handoff.table", "tests/kvstore/handoff/test_slot_writers.py"
_TICKET, _CONTENT = "kvstore.blocks.ticket", "tests/kvstore/handoff/test_named_by_content.py"

HANDOFFS: tuple[Mutant, ...] = (
    bug(
        "withdraw frees at once",
        "ours: another's published blocks were overwritten",
        _TABLE,
        '            if handoff.over:\n                return False\n            self._end(handoff, "withdrawn")\n',
        (
            "            if handoff.over:\n                return False\n            handoff.is_written = False\n"
            '            self._end(handoff, "withdrawn")\n'
        ),
        f"{EXPLORER}[withdrawn_while_written]",
    ),
    bug(
        "clear frees at once",
        "ours: another's published blocks were overwritten",
        _TABLE,
        'not handoff.claim_id:\n                self._end(handoff, "cleared")\n',
        "not handoff.claim_id:\n                handoff.is_written = False\n"
        '                self._end(handoff, "cleared")\n',
        f"{EXPLORER}[cleared_while_written]",
    ),
    bug(
        "what a clearing made void is freed while it is written",
        "ours: another's published blocks were overwritten",
        _TABLE,
        'version_of(handoff.namespace):\n                    self._end(handoff, "cleared")\n',
        "version_of(handoff.namespace):\n                    handoff.is_written = False\n"
        '                    self._end(handoff, "cleared")\n',
        f"{EXPLORER}[cleared_and_looked_after]",
    ),
    bug(
        "a stage's slots free while they are packed",
        "ours",
        _TABLE,
        "        if handoff.is_written or handoff.claim_id:\n",
        "        if handoff.claim_id or (handoff.is_written and not handoff.place.slab):\n",
        f"{EXPLORER}[stage_slots_are_reused]",
    ),
    bug(
        "withdraw frees what is read",
        "ours",
        _TABLE,
        "        if handoff.is_written or handoff.claim_id:\n",
        "        if handoff.is_written:\n",
        f"{EXPLORER}[withdrawn_while_read]",
    ),
    bug(
        "slots free while the mover spills to them",
        "ours",
        _TABLE,
        "        if move.over and not move.busy:\n",
        "        if move.over:\n",
        f"{EXPLORER}[claim_ends_while_it_is_spilled]",
    ),
    bug(
        "a withdrawn hand-off outlives its dead publisher",
        "ours",
        _TABLE,
        "h.owner == owner and (h.is_written or not h.over)]",
        "h.owner == owner and not h.over]",
        f"{EXPLORER}[publisher_dies]",
    ),
    bug(
        "the claim of another ends a ticket",
        "ours",
        _TABLE,
        "            if handoff is None or handoff.claim_owner != owner:\n",
        "            if handoff is None:\n",
        f"{_WRITERS}::test_a_claim_is_ended_by_its_reader_alone",
    ),
    bug(
        "a ticket's name is without its holder's hash",
        "ours: a client sent its own ticket with another prompt",
        _TICKET,
        " + fields + last_hash).digest()",
        " + fields).digest()",
        f"{_CONTENT}::test_a_forged_ticket_brings_nothing_and_harms_nothing[two nodes-with another prompt]",
    ),
    bug(
        "a ticket's name is without its number of blocks",
        "ours",
        _TICKET,
        '{"expires_s": 0.0, "namespace": namespace}',
        '{"expires_s": 0.0, "namespace": namespace, "num_blocks": 1}',
        f"{_CONTENT}::test_a_forged_ticket_brings_nothing_and_harms_nothing[one node-fewer blocks, all hashes]",
    ),
    bug(
        "a prompt of no block trusts every ticket",
        "ours",
        "kvstore.client.handoff.fetch",
        'attached.chain(hashes).end(space.digest, "hashes")[1]',
        "attached.chain(hashes).data[-32:]",
        f"{_CONTENT}::test_blocks_that_were_published_without_hashes_are_not_taken_for_any",
    ),
    bug(
        "who knows the ticket ends its writing",
        "ours",
        _TABLE,
        "            if handoff.writer != writer:\n                return False\n",
        "",
        f"{_WRITERS}::test_who_knows_the_ticket_cannot_say_that_its_publisher_has_ended",
    ),
    Mutant(
        name="partly queued failure frees",
        source="ours: kernels go on after a refused launch",
        patches=(
            Patch(
                "kvstore.engine.stage_copier",
                "            await_copies(pages)  # After the failure the caller may reuse blocks and slots.\n",
                "",
            ),
            Patch(
                "kvstore.client.handoff.publication",
                "            self._copier.finish(self.pages)\n",
                "            pass\n",
            ),
        ),
        tests=(f"{_WRITERS}::test_copies_that_are_queued_in_part_have_ended_when_their_failure_is_heard",),
    ),
    bug(
        "partly queued failure has no mark",
        "ours: kernels go on after a refused launch",
        "kvstore.engine.cuda_order",
        "            self.unmarked = (*self.unmarked, *streams)\n",
        "            pass\n",
        f"{_WRITERS}::test_copies_that_are_queued_in_part_have_ended_when_their_failure_is_heard[True]",
    ),
    bug(
        "a READ for one life's stage is made by the next mover",
        "ours: a new mover's stage has the number of the old one",
        "kvstore.mover.link",
        "generation not in (0, self._generation)",
        "False",
        "tests/kvstore/handoff/test_stages.py::test_what_was_claimed_in_one_movers_stage_is_not_read_into_the_next_ones",
    ),
    bug(
        "a READ that was posted in part is terminal",
        "NIXL: a request that is refused lets go of what it has started",
        "kvstore.mover.nixl",
        "            if self._num_descriptors(request, description) == 1:\n",
        "            if True:\n",
        "tests/kvstore/mover/test_partly_posted.py::test_a_request_that_is_refused_after_a_part_was_started_is_lost",
    ),
    bug(
        "a part of a shared READ that was posted in part is terminal",
        "NIXL: a request that is refused lets go of what it has started",
        "kvstore.mover.parallel",
        "                read.is_lost = True\n                read.ended.set()\n",
        "                read.end_part(None, ReadTotals())\n",
        "tests/kvstore/mover/test_partly_posted.py::test_a_shared_read_of_which_a_part_is_lost_is_lost",
    ),
    bug(
        "slots of a READ that was posted in part are free",
        "NIXL: a request that is refused lets go of what it has started",
        "kvstore.mover.reads",
        "            if self._transport.poll(handle) is not ReadState.DONE:\n                return False\n",
        "            if self._transport.poll(handle) is ReadState.RUNNING:\n                return False\n",
        "tests/kvstore/mover/test_partly_posted.py::test_slots_of_a_read_that_was_posted_in_part_wait_for_the_movers_end",
    ),
    bug(
        "copies between GPUs go on behind a refusal",
        "ours",
        "kvstore.kernels.vram",
        "                driver.cuStreamSynchronize(self._stream)\n",
        "",
        "tests/kvstore/mover/test_partly_posted.py::test_copies_between_gpus_have_ended_when_one_is_refused",
    ),
    bug(
        "stuck copies free with the next job",
        "ours",
        "kvstore.client.idle_connections",
        "self._since = connection.next_question",
        "self._since = 0",
        f"{_WRITERS}::test_a_copy_that_never_ends_keeps_its_slots_whatever_becomes_of_the_ticket",
    ),
)
