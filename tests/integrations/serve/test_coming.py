"""Prompts that are on their way to a replica."""

from __future__ import annotations

import random

from kvstore.integrations.serve.coming import ComingPrompts

CHAIN = [b"1", b"2", b"3"]


def test_a_prompt_counts_at_its_replica_until_it_is_there():
    coming = ComingPrompts()
    coming.begin("r", "a", CHAIN, 48, 0.0)

    assert (coming.prefix([*CHAIN, b"4"], "a"), coming.tokens_at("a")) == (3, 48)
    assert (coming.prefix(CHAIN, "b"), coming.tokens_at("b")) == (0, 0)
    assert coming.prefix([b"9", b"8"], "a") == 0

    coming.end("r")
    coming.end("r")

    assert (coming.prefix(CHAIN, "a"), coming.tokens_at("a"), len(coming)) == (0, 0, 0)


def test_what_two_prompts_have_counts_until_the_last_of_them_is_there():
    coming = ComingPrompts()
    coming.begin("r", "a", CHAIN, 48, 0.0)
    coming.begin("s", "a", CHAIN[:2], 0, 0.0)

    coming.end("r")

    assert coming.prefix(CHAIN, "a") == 2


def test_another_choice_takes_the_place_of_the_first():
    coming = ComingPrompts()
    coming.begin("r", "a", CHAIN, 48, 0.0)
    coming.begin("r", "b", CHAIN, 48, 1.0)

    assert (coming.prefix(CHAIN, "a"), coming.prefix(CHAIN, "b"), len(coming)) == (0, 3, 1)


def test_the_end_at_another_replica_ends_no_way():
    coming = ComingPrompts()
    coming.begin("r", "b", CHAIN, 48, 0.0)

    coming.end_at("r", "a")
    assert coming.prefix(CHAIN, "b") == 3

    coming.end_at("r", "b")
    assert len(coming) == 0


def test_a_request_that_was_given_up_counts_for_a_bounded_time():
    coming = ComingPrompts(ttl_s=5.0)
    coming.begin("r", "a", CHAIN, 48, 0.0)
    coming.begin("s", "a", CHAIN[:1], 16, 4.0)

    coming.end_stale(5.0)
    assert coming.prefix(CHAIN, "a") == 3

    coming.end_stale(5.1)
    assert (coming.prefix(CHAIN, "a"), coming.tokens_at("a")) == (1, 16)


def test_the_oldest_requests_are_forgotten_when_there_are_too_many_and_those_of_a_replica_that_ended():
    coming = ComingPrompts(max_requests=2)
    for number in range(4):
        coming.begin(str(number), "a", [b"root", b"%d" % number], 1, 0.0)

    assert [coming.prefix([b"root", b"%d" % number], "a") for number in range(4)] == [1, 1, 2, 2]

    coming.forget("a")

    assert len(coming) == 0


def test_counts_are_those_of_the_open_requests_after_any_calls():
    for seed in range(20):
        dice, coming, model = random.Random(seed), ComingPrompts(), dict[str, tuple[str, list[bytes], int]]()
        for _ in range(300):
            request, replica = str(dice.randrange(8)), dice.choice("abc")
            if dice.random() < 0.6:
                blocks = [b"%d" % (dice.randrange(2)) * depth for depth in range(1, dice.randrange(1, 5))]
                coming.begin(request, replica, blocks, 7, 0.0)
                model[request] = replica, blocks, 7
            elif dice.random() < 0.9:
                coming.end(request)
                model.pop(request, None)
            else:
                coming.forget(replica)
                model = {each: what for each, what in model.items() if what[0] != replica}
            assert len(coming) == len(model)
            for name in "abc":
                mine = [what for what in model.values() if what[0] == name]
                assert coming.tokens_at(name) == sum(what[2] for what in mine)
                for block in {block for what in mine for block in what[1]}:
                    assert coming.prefix([block], name) == 1
                assert coming.prefix([b"none"], name) == 0
