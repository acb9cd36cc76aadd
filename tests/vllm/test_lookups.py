"""When a request hears what is stored of it, and when its hashes are made."""

from __future__ import annotations

import pickle
import queue
import threading
from types import SimpleNamespace

import pytest
from sides import scheduler_side

from kvstore.client.results import Match

SIZE = 16


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    import kvstore
    from kvstore.integrations.vllm import options, stats
    from kvstore.integrations.vllm.scheduler_side import keys, lookups

    shape = kvstore.KVShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_size=SIZE)
    return SimpleNamespace(
        keys=keys,
        lookups=lookups,
        stats=stats,
        options=options.Options(lookup_wait_s=5.0),
        space=kvstore.Namespace(model="m", shape=shape),
    )


class Client:
    """Has the blocks of one prompt; says how many it was asked for each time."""

    def __init__(self, known, says_absent=False):
        self.known, self.asked, self.gate, self.says_absent = known, [], threading.Event(), says_absent
        #: How long each lookup may wait for saves; None is the store's setting.
        self.save_waits_s = []
        self.gate.set()

    def is_surely_absent(self, hashes, *, remote=True):
        assert len(hashes) == 1, "the first block decides"
        return self.says_absent and hashes != self.known[:1]

    def lookup(self, hashes, *, remote=True, timeout_s=None, meanwhile=None, save_wait_s=None):
        assert self.gate.wait(5)
        if meanwhile is not None:
            meanwhile()
        self.asked.append(len(hashes))
        self.save_waits_s.append(save_wait_s)
        pairs = zip(hashes, self.known, strict=False)
        return Match(num_local=next((at for at, (a, b) in enumerate(pairs) if a != b), len(hashes)))


@pytest.fixture
def make(parts):
    """Makes a thread of lookups, and questions for it."""
    made = []

    def lookups(client):
        link = SimpleNamespace(client=lambda: client)
        made.append(
            parts.lookups.Lookups(link, parts.options, parts.stats.Stats(), threading.Event(), queue.SimpleQueue())
        )
        return made[-1]

    def question(tokens, is_lookup=True, **more):
        request = SimpleNamespace(
            prompt_token_ids=tokens, num_prompt_tokens=len(tokens), lora_request=None, mm_features=None, cache_salt=None
        )
        return parts.lookups.Question(parts.keys.PromptHashes(parts.space, request), None, is_lookup=is_lookup, **more)

    yield SimpleNamespace(lookups=lookups, question=question)
    for one in made:
        one.close()


def test_a_new_prompt_is_known_after_its_first_block_and_hashed_behind_those_that_wait(make, parts, eventually):
    client = Client(parts.space.block_hashes(range(4 * SIZE)))
    lookups, order = make.lookups(client), []
    new, known = make.question(list(range(1, 200 * SIZE))), make.question(list(range(4 * SIZE)))
    for name, question in (("new", new), ("known", known)):
        hash_all = question.hash_all
        question.hash_all = lambda hash_all=hash_all, name=name: (order.append(name), hash_all())[1]
    client.gate.clear()
    lookups.ask(new)
    lookups.ask(known)
    client.gate.set()
    eventually(lambda: new.done and known.done and new.hashes is not None, 5)
    assert (new.num_blocks, known.num_blocks) == (0, 4)
    assert client.asked == [1, 1, 4]
    assert order[0] == "known", "an answer comes before hashes that only saves need"
    assert new.hashes == parts.space.block_hashes(range(1, 200 * SIZE))


def test_one_question_waits_for_what_is_being_saved_but_not_twice_for_the_same(make, parts, eventually):
    client = Client(parts.space.block_hashes([*range(4 * SIZE), *range(100, 100 + SIZE)]))
    question = make.question(list(range(5 * SIZE)))
    make.lookups(client).ask(question)
    eventually(lambda: question.done, 5)
    assert (question.num_blocks, client.asked) == (4, [1, 5, 5])
    assert (question.num_local, question.num_here) == (4, 4)
    assert client.save_waits_s == [None, None, 0.0]


def test_hashes_for_saves_leave_the_step_after_an_answer_alone_and_questions_do_not_hold_them_up_for_ever(
    make, parts, monkeypatch
):
    now_s, lookups = [100.0], make.lookups(Client([]))
    lookups.close()
    monkeypatch.setattr(parts.lookups, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    waited_s, late, asked = [], object(), SimpleNamespace(done=False)

    def get(timeout=None):
        waited_s.append(timeout)
        if timeout is None or now_s[0] > 100.0:
            return asked
        raise queue.Empty

    monkeypatch.setattr(lookups, "_questions", SimpleNamespace(get=get, put=lambda question: None))
    assert lookups.next_question() is asked
    lookups.late.append((100.002, late))
    assert lookups.next_question() is late
    assert waited_s == [None, pytest.approx(0.002)]
    lookups.late.append((100.002, late))
    now_s[0] = 100.01
    assert lookups.next_question() is asked, "who waits for an answer comes first"
    now_s[0] = 100.1
    assert lookups.next_question() is late
    assert waited_s[2:] == [0.0]


def test_what_surely_is_nowhere_is_answered_at_once_and_hashed_when_told(make, parts, eventually):
    client = Client(parts.space.block_hashes(range(4 * SIZE)), says_absent=True)
    lookups, new, known = make.lookups(client), make.question([*range(1, 5 * SIZE)]), make.question([*range(4 * SIZE)])
    lookups.ask(new)
    assert (new.done, new.is_given, new.num_blocks, new.hashes) == (True, True, 0, None)
    assert lookups.num_unhashed_tokens == 5 * SIZE - 1
    lookups.ask(known)
    assert not known.is_given
    eventually(lambda: known.done, 5)
    assert known.num_blocks == 4
    assert client.asked == [1, 4], "of the new one nobody was asked"
    assert new.hashes is None
    lookups.hash_rest()
    assert lookups.num_unhashed_tokens == 0
    eventually(lambda: new.hashes is not None, 5)
    assert new.hashes == parts.space.block_hashes(range(1, 5 * SIZE))


def test_hashes_of_what_was_answered_at_once_come_behind_questions(make, eventually):
    client, order = Client([], says_absent=True), []
    lookups, new, asked = make.lookups(client), make.question([1] * 100 * SIZE), make.question([2] * 4 * SIZE)
    lookups.ask(new)
    client.says_absent = False
    hash_all = new.hash_all
    new.hash_all = lambda: (order.append(asked.done), hash_all())[1]
    client.gate.clear()
    first = make.question([3] * 4 * SIZE)
    lookups.ask(first)
    lookups.hash_rest()
    lookups.ask(asked)
    client.gate.set()
    eventually(lambda: new.hashes is not None and asked.hashes is not None and first.done, 5)
    assert order == [True], "the question behind it was answered before"


@pytest.mark.parametrize("why", ["no lookup", "no block", "no store"])
def test_what_is_not_looked_up_is_answered_at_once_and_hashed_all_the_same(make, parts, eventually, why):
    client = Client(parts.space.block_hashes(range(4 * SIZE)))
    lookups = make.lookups(None if why == "no store" else client)
    num_tokens = SIZE - 1 if why == "no block" else 5 * SIZE
    question = make.question(list(range(num_tokens)), is_lookup=why != "no lookup")
    lookups.ask(question)
    assert question.done
    lookups.hash_rest()
    eventually(lambda: question.hashes is not None, 5)
    assert not client.asked
    assert question.hashes == parts.space.block_hashes(range(num_tokens))


def test_embeddings_are_hashed_on_the_thread(make):
    question = make.question([0] * 4 * SIZE)
    question.prompt._request.prompt_embeds = object()
    lookups = make.lookups(Client([], says_absent=True))
    lookups.close()
    lookups.ask(question)
    assert not question.done


def test_a_hand_off_is_answered_with_its_hashes(make, parts, eventually):
    question, seen = make.question(list(range(200 * SIZE)), needs_hashes=True), []
    hash_all = question.hash_all
    question.hash_all = lambda: (seen.append(question.done), hash_all())[1]
    make.lookups(Client([])).ask(question)
    eventually(lambda: question.done, 5)
    assert not any(seen)
    assert len(question.hashes) == 200


def test_a_prompt_that_cannot_be_hashed_is_computed_and_the_next_is_answered(make, parts, eventually):
    client = Client(parts.space.block_hashes(range(4 * SIZE)))
    lookups = make.lookups(client)
    bad, good = make.question([-1] * 4 * SIZE), make.question(list(range(4 * SIZE)))
    lookups.ask(bad)
    lookups.ask(good)
    eventually(lambda: bad.done and good.done, 5)
    assert (bad.num_blocks, good.num_blocks) == (0, 4)


@pytest.fixture
def side(parts):
    """A scheduler's half without a store, whose answers are given by hand: `side.asked` has the questions."""
    made = scheduler_side()
    made.asked = []
    made.handoffs = SimpleNamespace(begin=lambda tracked: None, plan=lambda *args: None, end=lambda *args: None)
    made.lookups = SimpleNamespace(ask=made.asked.append, is_held_up=lambda: False, num_unhashed_tokens=0)
    return made


def request_of(name):
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[1] * 64,
        num_prompt_tokens=64,
        skip_reading_prefix_cache=False,
        num_computed_tokens=64,
    )


def test_an_answer_that_was_seen_ends_no_later_wait_and_one_that_comes_meanwhile_does(side):
    side.answered.set()
    assert side.match(request_of("first"), 0) == (None, False)
    assert not side.answered.is_set()
    side.answered.set()
    assert side.match(request_of("second"), 0) == (None, False)
    assert side.answered.is_set(), "it is the first one's, who is asked again when this step ends"


def answer_at_once(side):
    """Let every question be answered at once, with nothing."""

    def ask(question):
        side.asked.append(question)
        question.done = question.is_given = True

    side.lookups.ask = ask


def test_a_prompt_that_surely_is_nowhere_is_computed_in_the_step_that_asks(side):
    answer_at_once(side)
    request = request_of("new")
    side.begin(request)
    assert side.match(request, 0) == (0, False)
    assert side.next_plan.num_waiting == 0
    assert side.match(request, 0) == (0, False)
    assert len(side.asked) == 1


def test_an_answer_that_came_at_once_is_too_old_after_a_second_in_the_queue(side, monkeypatch):
    from kvstore.integrations.vllm.scheduler_side import scheduler

    answer_at_once(side)
    request = request_of("waits")
    side.begin(request)
    later_s = side.asked[0].asked_s + 1.1
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: later_s))
    assert side.match(request, 0) == (0, False)
    assert len(side.asked) == 2


@pytest.mark.parametrize(
    ("num_computed", "is_launching", "is_late"), [(64, True, True), (1, True, False), (64, False, False)]
)
def test_hashes_wait_for_the_launches_of_a_step_that_takes_longer(side, num_computed, is_launching, is_late):
    hashed = []
    side.lookups.num_unhashed_tokens = 64
    side.lookups.hash_rest = lambda: hashed.append(True)
    side.is_launching = is_launching
    output = SimpleNamespace(
        total_num_scheduled_tokens=num_computed, scheduled_new_reqs=[], preempted_req_ids=None,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
    )  # fmt: skip
    plan = side.plan(output)
    assert bool(hashed) != is_late
    if is_late:
        sent = pickle.loads(pickle.dumps(plan))
        assert sent.launched.value is None, "in another process it is nothing"
        assert not hashed
        plan.launched.value()
    assert hashed == [True]


@pytest.fixture
def ended(parts):
    """A request that ended before its hashes were made: what the scheduler then plans for the next step."""
    from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

    side = scheduler_side()
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=list(range(64)), num_prompt_tokens=64, num_computed_tokens=64
    )
    question = SimpleNamespace(hashes=None, num_blocks=0, done=True)
    tracked = side.tracked["r"] = Tracked(request, question=question, block_ids=[5, 6, 7, 8])
    side.saving.plan(side.next_plan.saves, tracked, 0, 50)
    assert not side.next_plan.saves
    question.hashes = parts.space.block_hashes(range(64))
    return SimpleNamespace(side=side, request=request, tracked=tracked)


def test_hashes_that_come_after_the_last_step_are_used_at_the_end(ended, parts):
    assert ended.side.ended(ended.request, [5, 6, 7, 8])[0], "vLLM has to keep its blocks"
    (save,) = ended.side.next_plan.late_saves
    assert (save.block_ids, save.hashes) == ([5, 6, 7], parts.space.block_hashes(range(48))), "what was computed"
    assert ended.side.next_plan.ending == {"r"}


def test_of_a_request_without_blocks_nothing_is_saved(ended):
    """It was preempted: others have its blocks."""
    assert not ended.side.ended(ended.request, [])[0]
    assert not ended.side.next_plan.late_saves


@pytest.mark.parametrize("is_cleared", [False, True])
def test_what_was_computed_before_the_cache_was_cleared_is_not_saved_late(ended, parts, monkeypatch, is_cleared):
    from kvstore.blocks.part import WHOLE
    from kvstore.integrations.vllm.options import Options
    from kvstore.integrations.vllm.worker_side.worker import WorkerSide

    ended.side.ended(ended.request, [5, 6, 7, 8])
    if is_cleared:
        ended.side.link = SimpleNamespace(clear=lambda: "")
        assert ended.side.reset()
    worker, begun = WorkerSide(Options(), None, None, WHOLE, 0, True, parts.stats.Stats()), []
    monkeypatch.setattr(worker, "begin_save", begun.append)
    worker.begin(ended.side.next_plan)
    assert len(begun) == (0 if is_cleared else 1)
    assert worker._report.saves_ended == ({"r": 1} if is_cleared else {})


# What vLLM says of a request, and what is stored of it.


@pytest.fixture
def surprised(ended):
    """A request of which 32 tokens are in the engine's own cache and 16 are loaded; says what a step lets be saved."""
    side, tracked = ended.side, ended.tracked
    side.lookups = SimpleNamespace(num_unhashed_tokens=0)
    tracked.num_engine_tokens, tracked.num_external_tokens, tracked.num_planned_tokens = 32, 16, 0

    def step(begin, count, ids=(5, 6, 7, 8)):
        new = SimpleNamespace(req_id="r", block_ids=(list(ids),), num_computed_tokens=begin)
        output = SimpleNamespace(
            total_num_scheduled_tokens=count, scheduled_new_reqs=[new], preempted_req_ids=None,
            num_scheduled_tokens={"r": count},
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
        )  # fmt: skip
        return [len(save.hashes) for save in side.plan(output).saves]

    return SimpleNamespace(step=step, side=side, tracked=tracked, request=ended.request)


def test_what_is_known_to_be_computed_is_saved(surprised):
    assert surprised.step(48, 16) == [4]
    assert "num_unsaved_requests" not in surprised.side.stats.total()


@pytest.mark.parametrize(
    ("begin", "count", "ids"),
    [
        (49, 15, (5, 6, 7, 8)),  # Who computed the one before?
        (48, 17, (5, 6, 7, 8)),  # More tokens than blocks.
        (48, 16, (5, 0, 7, 8)),  # A place without a block.
    ],
)
def test_surprises_of_vllm_are_never_stored(surprised, begin, count, ids):
    assert surprised.step(begin, count, ids) == []
    surprised.side.ended(surprised.request, list(ids))
    assert not surprised.side.next_plan.late_saves
    assert surprised.side.stats.total()["num_unsaved_requests"] == 1


def test_of_a_request_that_ended_with_other_blocks_nothing_more_is_saved(surprised):
    surprised.tracked.num_planned_tokens = 64
    surprised.side.ended(surprised.request, [5, 6, 9, 8])
    assert not surprised.side.next_plan.late_saves
    assert surprised.side.stats.total()["num_unsaved_requests"] == 1
