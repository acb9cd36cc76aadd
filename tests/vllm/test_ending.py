"""What becomes of the blocks of requests that ended: freed at once, and not overwritten before they are saved."""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
from sides import scheduler_side

from kvstore.errors import CopyStuck

_seeds = itertools.count(210_000, 10)


@pytest.fixture(scope="module")
def engines(model, start_engine, connector, unit):
    """One with room for two prompts of these tests and a little more, and one whose core is a process of its own."""
    # Not portable: a second cache would keep what is overwritten in the engine's own.
    options = connector(0)
    made = {
        "small": start_engine(model, block_size=unit, num_gpu_blocks_override=1200 // unit, connector=options,
                              max_model_len=1024, max_num_batched_tokens=1024),
        "apart": start_engine(model, block_size=unit, connector=options, has_core_process=True),
    }  # fmt: skip
    return {name: engine.wait_started() for name, engine in made.items()}


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("which", ["small", "apart"])
def test_an_engine_is_empty_as_soon_as_its_last_answer_is_there(
    engines, plain, prompt_of, same, unit, which, max_tokens
):
    engine, prompts = engines[which], [prompt_of(500, next(_seeds)) for _ in range(6)]
    for temperature in ("cold", "warm"):
        for at, tokens in enumerate(prompts):
            asked = [(f"{temperature} {at}", tokens, {})]
            answers, is_empty = engine.run_and_reset(asked, max_tokens=max_tokens)
            assert is_empty, f"{temperature}, {at}"
            same(answers, plain.run(asked, cold=True, max_tokens=max_tokens))


def test_several_at_once_and_aborted_ones(engines, prompt_of, is_clean):
    engine = engines["small"]
    for _ in range(3):
        asked = [(f"one of {seed}", prompt_of(200, seed), {}) for seed in itertools.islice(_seeds, 4)]
        assert engine.run_and_reset(asked)[1]
        engine.add("gone", prompt_of(600, next(_seeds)))
        engine.step(2)
        engine.abort("gone")
        assert engine.run_and_reset([("short", prompt_of(5, next(_seeds)), {})])[1]
    engine.settle()
    is_clean(engine)


def test_saves_that_take_long_do_not_keep_the_blocks(engines, plain, prompt_of, same, unit, is_clean):
    engine, tokens = engines["small"], prompt_of(500, next(_seeds))
    engine.hold_saves()
    cold, is_empty = engine.run_and_reset([("cold", tokens, {})])
    assert is_empty
    assert engine.tracked() > 0, "the save is still under way"
    assert engine.blocks()[0] == engine.blocks()[1]
    engine.let_saves()
    engine.settle()
    assert engine.tracked() == 0
    warm, _ = engine.run_and_reset([("warm", tokens, {})])
    assert warm[0]["num_cached"] == 500 // unit * unit
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    same(cold, wanted)
    same(warm, wanted)
    is_clean(engine)


@pytest.mark.parametrize("is_slow", [False, True])
def test_blocks_are_not_overwritten_before_their_saves_have_ended(
    engines, plain, prompt_of, same, unit, is_clean, is_slow
):
    """Two prompts need more blocks than there are: the second one gets blocks of the first."""
    engine, one, other = engines["small"], prompt_of(900, next(_seeds)), prompt_of(900, next(_seeds))
    abandoned = engine.stats()["worker"].get("num_abandoned_saves", 0)
    engine.hold_saves(until_wanted=not is_slow)
    for name, tokens in (("one", one), ("other", other)):
        asked = [(name, tokens, {})]
        answers, is_empty = engine.run_and_reset(asked)
        assert is_empty
        same(answers, plain.run(asked, cold=True))
    engine.let_saves()
    engine.settle()
    num_abandoned = engine.stats()["worker"].get("num_abandoned_saves", 0) - abandoned
    assert num_abandoned == int(is_slow), "a second is waited for a save whose blocks are wanted"
    engine.reset()
    for name, tokens in (("one again", one), ("other again", other)):
        asked = [(name, tokens, {})]
        answers = engine.run(asked)
        same(answers, plain.run(asked, cold=True))
        if name == "other again" or not is_slow:
            assert answers[0]["num_cached"] == 900 // unit * unit
        engine.reset()
    is_clean(engine)


def test_a_cleared_cache_ends_saves_at_once(engines, prompt_of, is_clean):
    engine, tokens = engines["small"], prompt_of(500, next(_seeds))
    engine.hold_saves()
    engine.run_and_reset([("before", tokens, {})])
    assert engine.empty(connector=True)
    engine.let_saves()
    engine.settle()
    (answer,) = engine.run([("after", tokens, {})])
    assert answer["num_cached"] == 0
    engine.reset()
    is_clean(engine)


# What an engine cannot be brought to at will.


class Copies:
    """Of a worker; says what it was asked for."""

    def __init__(self, has_landed=True):
        self.ended, self.has_it_landed = [], has_landed

    def end_saves(self, req_ids):
        self.ended.append(sorted(req_ids))

    def drop_saves(self):
        self.ended.append("all")

    def has_landed(self, req_id, wait_s):
        return self.has_it_landed


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import plan
    from kvstore.integrations.vllm.scheduler_side import ending, tracked

    return SimpleNamespace(ending=ending, plan=plan, tracked=tracked)


@pytest.fixture
def make(parts):
    def make(copies, *, keeps_memory=True, num_workers=1):
        made = parts.ending.Ending(16, num_workers, keeps_memory=keeps_memory)
        made.open(copies)
        return made

    return make


def ended(parts, name="r", block_ids=(3, 4, 5), **more):
    more = {"num_saves_open": 1} | more
    return parts.tracked.Tracked(SimpleNamespace(request_id=name), block_ids=list(block_ids), **more)


def blocks(*ids):
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def test_what_is_local_is_none_in_another_process(parts):
    assert pickle.loads(pickle.dumps(parts.plan.Local(Copies()))).value is None


@pytest.mark.parametrize(
    ("copies", "options", "more"),
    [
        ([None], {}, {}),  # The worker is in another process.
        ([Copies(), None], {"num_workers": 2}, {}),
        ([Copies()], {"keeps_memory": False}, {}),  # Sleep mode takes the memory away from under a save.
        ([Copies(has_landed=False)], {}, {"num_landing": 1}),  # What lands is written.
    ],
)
def test_blocks_that_vllm_has_to_keep(parts, make, copies, options, more):
    ending, plan = make(copies, **options), parts.plan.StepPlan()
    assert ending.add(plan, ended(parts, **more))
    assert plan.ending == {"r"}
    assert not ending.requests["r"].is_freed
    ending.given(blocks(3), 0)
    ending.settle(plan, [])
    assert not any(each.ended for each in copies if each)


@pytest.mark.parametrize("num_landing", [0, 1])
def test_blocks_that_vllm_gets_at_once(parts, make, num_landing):
    ending, plan = make([Copies()]), parts.plan.StepPlan()
    assert not ending.add(plan, ended(parts, num_landing=num_landing))
    assert plan.ending == set()
    assert ending.requests["r"].is_freed


@pytest.mark.parametrize(
    ("given", "num_engine_tokens", "new", "is_taken"),
    [
        ((7, 8), 0, [], False),
        ((3, 4, 5, 9), 48, [], False),  # A hit in the engine's own cache: it is read.
        ((3, 4, 5, 9), 47, [], True),
        ((7, 5), 16, [], True),
        ((7,), 0, [None, ([8, 4],)], True),  # A running request grew.
        ((), 0, [], True),  # To another connector, and which is not said.
    ],
)
def test_saves_end_before_their_blocks_are_others(parts, make, given, num_engine_tokens, new, is_taken):
    copies = Copies()
    ending, plan = make([copies]), parts.plan.StepPlan()
    ending.add(plan, ended(parts))
    ending.add(plan, ended(parts, "late", (5, 6), num_saves_open=1))
    plan.late_saves = [parts.plan.SavePlan(req_id="late", hashes=None, block_ids=[5, 6])]
    ending.given(blocks(*given), num_engine_tokens)
    ending.settle(plan, new)
    assert bool(copies.ended) == is_taken
    if is_taken and 4 not in (new[-1][0] if new else ()):
        assert copies.ended == [["late", "r"]] or copies.ended == [["r"]]
    assert len(plan.late_saves) == (0 if copies.ended == [["late", "r"]] else 1), "of bytes that are others' by now"
    ending.settle(plan, new)
    assert len(copies.ended) <= 1, "once"


def test_a_preempted_request_and_a_cleared_cache(parts, make):
    copies = Copies()
    ending = make([copies])
    ending.settle(parts.plan.StepPlan(settle={"p"}), [])
    ending.drop_saves()
    assert copies.ended == [["p"], "all"]


@pytest.fixture
def side():
    """A worker and what its saves are made of."""
    from concurrent.futures import Future

    from kvstore.blocks.part import WHOLE
    from kvstore.client.job import Job
    from kvstore.client.results import SaveResult
    from kvstore.integrations.vllm import options, plan, stats
    from kvstore.integrations.vllm.worker_side import landing, worker

    made = worker.WorkerSide(options.Options(), None, None, WHOLE, 0, True, stats.Stats())

    def begin(req_id, state):
        future = Future()
        if state != "queued":
            future.set_running_or_notify_cancel()
        if state == "done":
            future.set_result(SaveResult(num_blocks=1, num_written=1, num_refused=0))
        save = plan.SavePlan(req_id=req_id, hashes=None, block_ids=[3])
        job = Job(future, "save", lambda timeout_s: state != "stuck")
        made.saves.setdefault(req_id, []).append(landing.Running(save, None, job, 0.0))

    made.begin_one = begin
    return made


def test_saves_that_have_not_begun_are_dropped_and_reported(side):
    for req_id, state in (("a", "queued"), ("a", "running"), ("b", "queued"), ("b", "done"), ("b", "queued")):
        side.begin_one(req_id, state)
    side.drop_saves()
    assert not side.saves
    assert side.take_report().saves_ended == {"a": 2, "b": 3}
    assert side.stats.total()["num_abandoned_saves"] == 4


def test_a_save_that_is_stuck_loses_no_other(side, parts):
    for req_id, state in (("a", "stuck"), ("a", "queued"), ("b", "queued"), ("b", "stuck"), ("c", "done")):
        side.begin_one(req_id, state)
    for _ in range(2):
        with pytest.raises(CopyStuck, match="restart"):
            side.drop_saves()
    assert side.take_report().saves_ended == {"a": 1, "b": 1, "c": 1}
    side.unsent |= {"a", "c"}
    assert side.poll(parts.plan.StepPlan(is_computing=True))[0] == {"c"}, "blocks that are still read are not free"


@pytest.mark.parametrize("error", [CopyStuck("stuck"), CancelledError(), KeyboardInterrupt()])
def test_a_reset_clears_the_store_whatever_becomes_of_saves(error):
    from kvstore.integrations.vllm.scheduler_side import tracked

    made = scheduler_side()
    cleared = []
    made.link = SimpleNamespace(clear=lambda: cleared.append("space"))
    made.tracked["r"] = tracked.Tracked(SimpleNamespace(request_id="r"), may_save=True, num_saves_open=1)

    def fail():
        raise error

    other = Copies()
    made.ending._copies = [other, SimpleNamespace(drop_saves=fail), other]
    with pytest.raises(type(error)):
        made.reset()
    assert cleared == ["space"]
    assert other.ended == ["all", "all"], "an error of one worker hides no other"
    assert not made.tracked["r"].may_save, "what was computed before is stored no more"
    assert made.next_plan.drop_saves
