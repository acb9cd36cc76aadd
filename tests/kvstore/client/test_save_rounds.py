"""What a save says of itself when it takes more than one round: others gave up what it waited for."""

from __future__ import annotations

from types import SimpleNamespace

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.blocks.grants import StoreTicket
from kvstore.blocks.indexes import pack_ints
from kvstore.blocks.part import as_part
from kvstore.client.save import run_save
from kvstore.client.work import CopyGuard
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Prepare
from kvstore.runtime import clock

CHAIN = BlockHashes(b"n" * 32, b"n" * 32, 0, b"".join(bytes([i]) * 32 for i in range(1, 4)))


def ticket(*indexes, num_refused=0, num_awaited=0):
    made = StoreTicket(
        write_id=1,
        packed_indexes=pack_ints(indexes),
        packed_slots=pack_ints(indexes),
        num_resident=3 - len(indexes) - num_refused,
        num_refused=num_refused,
        num_awaited=num_awaited,
        generations=bytes(4 * len(indexes)),
        epoch=bytes(8),
    )
    return Op.PREPARE_STORE, encode(made)


def number(op, value):
    return op, encode(value)


def save(*answers, part=None):
    """Run a save whose store gives these answers."""
    left = list(answers)

    def ask(op, payload):
        wanted, answer = left.pop(0)
        assert op is wanted
        return SimpleNamespace(take=lambda wait_s: answer, close=lambda: None)

    copier = SimpleNamespace(
        into_slots=lambda pages, indexes, slots: None, check_unchanged=lambda: None, num_slots=1 << 20
    )
    steps = run_save(
        SimpleNamespace(ask=ask, fileno=lambda: 0), copier, Prepare(CHAIN, num_clears=0), None, part or as_part(None),
        CopyGuard(), 1.0, clock.now_s() + 60.0,
    )  # fmt: skip
    found = None
    while found is None:
        try:
            assert next(steps).until_s < clock.now_s() + 1.0, "a pause between rounds, and not for long"
        except StopIteration as end:
            found = end.value
    assert not left
    return found.num_blocks, found.num_written, found.num_refused


def test_what_is_evicted_while_others_are_waited_for_is_written_again_and_counts_once():
    assert save(
        ticket(0, 1, num_awaited=1),
        number(Op.COMPLETE_STORE, 2),
        number(Op.AWAIT_STORE, 0),  # The first two are gone again, and the third was given up.
        ticket(0, 1, 2),
        number(Op.COMPLETE_STORE, 3),
    ) == (3, 3, 0)


def test_what_is_refused_in_the_second_round_does_not_count_as_written_in_the_first():
    assert save(
        ticket(1, num_awaited=2),
        number(Op.COMPLETE_STORE, 1),
        number(Op.AWAIT_STORE, 0),
        ticket(0, num_refused=2),
        number(Op.COMPLETE_STORE, 1),
    ) == (1, 1, 2)


def test_the_blocks_of_one_round_are_its_own():
    assert save(ticket(0, 1, 2), number(Op.COMPLETE_STORE, 3)) == (3, 3, 0)
    assert save(ticket(1, 2, num_awaited=1), number(Op.COMPLETE_STORE, 2), number(Op.AWAIT_STORE, 3)) == (3, 2, 0)


def test_a_rank_counts_the_parts_that_it_wrote_of_blocks_that_all_ranks_have():
    part = as_part((0, 2, 0, 1))
    assert save(ticket(0, 1, 2), number(Op.COMPLETE_STORE, 0), number(Op.AWAIT_STORE, 2), part=part) == (2, 2, 0)
