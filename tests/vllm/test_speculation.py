"""Drafts: of a step that rejects some, nothing that they left in the cache is stored; EAGLE computes its last block."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from asking import cached, one_by_one
from sides import SIZE, Lookups, request, scheduler_side

NUM_DRAFTS = 4
#: Answers are made of these alone, and every prompt has them: there is a draft in each step, and most are rejected.
WORDS = list(range(8))
_seeds = itertools.count(810_000, 10)


@pytest.fixture(scope="module")
def engine(model, start_engine, connector, unit):
    drafts = {
        "method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
    }  # fmt: skip
    return start_engine(
        model, block_size=unit, connector=connector(0, save="all"), speculative_config=drafts
    ).wait_started()


def test_answers_that_end_on_a_block_and_in_a_rejected_draft(engine, prompt_of, same, unit, is_clean):
    for _ in range(4):
        begins = prompt_of(20, next(_seeds)) + WORDS
        num_answer = 3 * unit - len(begins)
        (answer,) = engine.run([("first turn", begins, {"words": WORDS})], max_tokens=num_answer)
        turn = begins + answer["tokens"] + prompt_of(10, next(_seeds))
        assert engine.reset()
        (warm,) = engine.run([("second turn", turn, {})])
        same([warm], engine.run([("computed", turn, {"salt": "apart"})], cold=True))
        # The last token of an answer is sampled, and not computed: the block that it ends is never whole.
        assert warm["num_cached"] == 2 * unit
    num_drafted, num_accepted = engine.drafts()
    assert num_drafted > 2 * num_accepted > 0, "with none rejected, or none accepted, this test says nothing"
    is_clean(engine)


class Engine:
    """One request at a time, as vLLM's scheduler runs it: drafts in every step, of which it accepts as many as told."""

    def __init__(self, side, num_prompt_tokens):
        self.side, self.request = side, request(num_tokens=num_prompt_tokens)
        self.block_ids = list(range(1, 20))
        side.begin(self.request)
        side.match(self.request, 0)
        new = SimpleNamespace(req_id="r", block_ids=(self.block_ids,), num_computed_tokens=0)
        self.saved = []
        self._step([new], [], num_prompt_tokens)
        self.request.all_token_ids.append(1000)

    def decode(self, num_accepted, num_cut=0):
        """Sample behind drafts; a token is known when its step has ended. What lies behind one that ends it is cut."""
        self._step([], [self.request.num_computed_tokens], 1 + NUM_DRAFTS)
        self.request.num_computed_tokens -= NUM_DRAFTS - num_accepted
        self.request.all_token_ids.extend([1000] * (1 + num_accepted - num_cut))

    def end(self):
        self.request.num_tokens = len(self.request.all_token_ids)
        self.side.ended(self.request, self.block_ids)
        return self.saved + self._numbers(self.side.next_plan.late_saves)

    def _step(self, new, begins, num_tokens):
        self.request.num_tokens = len(self.request.all_token_ids)
        cached = SimpleNamespace(
            req_ids=["r"] * len(begins), new_block_ids=[None] * len(begins), num_computed_tokens=begins,
            resumed_req_ids=set(),
        )  # fmt: skip
        plan = self.side.plan(
            SimpleNamespace(
                scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": num_tokens},
                total_num_scheduled_tokens=num_tokens, preempted_req_ids=None,
            )
        )  # fmt: skip
        self.saved += self._numbers(plan.saves)
        self.request.num_computed_tokens += num_tokens

    def _numbers(self, saves):
        return [len(save.hashes) for save in saves]


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_while_a_request_runs_drafts_are_none_of_its_tokens(num_accepted):
    """A block is saved in the step that computes its last token, and not one before where that was a draft."""
    engine = Engine(scheduler_side("all"), 2 * SIZE - 4)
    assert engine.saved == [1]
    engine.decode(num_accepted)  # 2 * SIZE - 3 are known, and up to token 2 * SIZE + 1 is planned.
    assert engine.saved == [1]
    num_known = 2 * SIZE - 3 + 1 + num_accepted
    engine.decode(0)
    assert engine.saved == ([1, 2] if num_known >= 2 * SIZE else [1])


@pytest.mark.parametrize(("num_accepted", "num_cut"), [(a, cut) for a in range(NUM_DRAFTS + 1) for cut in range(a + 1)])
@pytest.mark.parametrize("num_behind", [-1, 0, 1])
def test_when_it_ends_rejected_drafts_are_none_either(num_accepted, num_cut, num_behind):
    """Whether what it samples last ends it, or an accepted draft: that one is computed."""
    num_new = 1 + num_accepted - num_cut
    engine = Engine(scheduler_side("all"), 2 * SIZE - 1 + num_behind - num_new)
    engine.decode(num_accepted, num_cut)
    assert len(engine.request.all_token_ids) == 2 * SIZE + num_behind
    is_whole = num_behind > 0 or (num_behind == 0 and num_cut > 0)
    assert max(engine.end()) == (2 if is_whole else 1)


def test_eagle_loads_what_vllm_would_take_from_its_own_cache(
    model, eagle_head, start_engine, connector, prompt_of, same, unit, is_clean
):
    """Its layer keeps, for a block's last token, what depends on the token behind the block."""
    drafts = {"method": "eagle", "model": eagle_head, "num_speculative_tokens": 2}
    engine = start_engine(
        model, block_size=unit, connector=connector(0), speculative_config=drafts
    ).wait_started()  # fmt: skip
    prompts = [(f"eagle-{n}", prompt_of(n, next(_seeds)), {}) for n in (unit + 3, 4 * unit, 200)]
    cold, own = one_by_one(engine, prompts), one_by_one(engine, prompts)
    assert engine.stats()["worker"].get("num_load", 0) == 0, "the engine has all that it may use"
    assert engine.reset()
    warm = one_by_one(engine, prompts)
    for answers in (own, warm):
        same(answers, cold)
    assert cached(warm) == cached(own) == [0, 2 * unit, (200 // unit - 1) * unit]
    assert engine.drafts()[0] > 0
    is_clean(engine)


class Stored(Lookups):
    """Has the first blocks of each prompt."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks

    def ask(self, question):
        super().ask(question)
        question.num_blocks = min(self.num_blocks, len(question.hashes))

    def is_held_up(self):
        return False


@pytest.mark.parametrize("num_tokens", [SIZE - 1, SIZE, SIZE + 1, 3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
@pytest.mark.parametrize("num_stored", range(4))
def test_a_drafter_of_states_gets_one_matched_block_less(num_tokens, num_stored):
    """As in vLLM's own cache, whose matches end before the prompt's last token."""
    side = scheduler_side(num_anew=1)
    side.lookups = Stored(num_stored)
    num_matched = min(num_stored, (num_tokens - 1) // SIZE)
    wanted = max(0, num_matched - 1) * SIZE
    assert side.match(request(num_tokens=num_tokens), 0) == (wanted, wanted > 0)
    plain = scheduler_side()
    plain.lookups = Stored(num_stored)
    num_all = min(num_stored, num_tokens // SIZE) * SIZE
    assert plain.match(request(num_tokens=num_tokens), 0) == (num_all, num_all > 0)
