"""Beside other connectors in vLLM's MultiConnector, here its NixlConnector with NIXL: the store is the prefix cache."""

from __future__ import annotations

import itertools

import pytest
from asking import Grown, cached, check_cold_and_warm, decoded, full, handed_off, one_by_one
from sides import request, scheduler_connector

from kvstore.integrations.space_text import space_from_text

BESIDE_NIXL = [("NixlConnector", "RaykvConnector"), ("RaykvConnector", "NixlConnector")]
#: Where engine and caller are one process, MultiConnector of vLLM 0.28 cannot read the counts of any connector.
NO_COUNTS = {"disable_log_stats": True}
_seeds = itertools.count(830_000, 10)


@pytest.fixture(scope="module")
def beside_nixl(model, start_engine, connector, unit):
    """An engine for each order, on a node each."""
    made = [
        start_engine(model, block_size=unit, among=among, connector=connector(node), **NO_COUNTS)
        for node, among in enumerate(BESIDE_NIXL)
    ]
    return dict(zip(BESIDE_NIXL, [engine.wait_started() for engine in made], strict=True))


@pytest.mark.parametrize("among", BESIDE_NIXL, ids="-".join)
def test_prompts_come_from_the_store_from_the_first_one_on(among, beside_nixl, plain, prompt_of, same, unit, is_clean):
    engine = beside_nixl[among]
    prompts = [(f"{among}-{n}", prompt_of(n, next(_seeds)), {}) for n in (200, 4 * unit, 333)]
    wanted = one_by_one(plain, prompts)
    cold = one_by_one(engine, prompts)
    assert engine.reset()
    warm = engine.run(prompts)
    for answers in (cold, warm):
        same(answers, wanted)
    assert cached(cold) == [0] * len(prompts)
    assert cached(warm) == full(prompts, unit)
    assert space_from_text(engine.spaces()[0]).shape.block_size == unit
    is_clean(engine)


@pytest.mark.parametrize("among", BESIDE_NIXL, ids="-".join)
def test_nixl_hands_off_and_the_store_is_the_cache(among, beside_nixl, plain, prompt_of, same, unit, is_clean):
    decode, prefill = beside_nixl[among], beside_nixl[among[::-1]]
    for num_tokens in (200, 4 * unit):
        tokens = prompt_of(num_tokens, next(_seeds))
        wanted = one_by_one(plain, [("plain", tokens, {})])
        stored, loaded = Grown(prefill, "num_saved_blocks"), Grown(decode, "num_load")
        params = handed_off(prefill, tokens)
        assert "raykv_ticket" not in params
        same([decoded(decode, tokens, params)], wanted)
        assert stored.by_rank() == [num_tokens // unit]
        # The first one that has the blocks brings them.
        assert loaded.by_rank() == [int(among[0] == "RaykvConnector")]
        assert decode.reset()
        again = one_by_one(decode, [("again", tokens, {})])
        same(again, wanted)
        assert cached(again) == [num_tokens // unit * unit]
    assert decode.stats()["scheduler"].get("num_bad_tickets", 0) == 0
    is_clean(prefill, decode)


def test_several_workers(model, start_engine, connector, plain, prompt_of, same, unit, is_clean):
    engine = start_engine(
        model, block_size=unit, among=BESIDE_NIXL[0], tensor_parallel_size=2, connector=connector(0, salt="ranks"),
        **NO_COUNTS,
    ).wait_started()  # fmt: skip
    prompts = [(f"ranks-{n}", prompt_of(n, next(_seeds)), {}) for n in (200, 4 * unit)]
    check_cold_and_warm(engine, prompts, one_by_one(plain, prompts), same, unit)
    is_clean(engine)


def test_a_core_process_has_found_its_store_before_the_first_request(
    model, start_engine, connector, plain, prompt_of, same, unit, eventually
):
    engine = start_engine(
        model, block_size=unit, among=BESIDE_NIXL[0], connector=connector(0, salt="core"), has_core_process=True
    ).wait_started()
    eventually(lambda: engine.empty(connector=True), 30)
    prompts = [("core", prompt_of(200, next(_seeds)), {})]
    wanted = one_by_one(plain, prompts)
    same(engine.run_and_reset(prompts)[0], wanted)
    eventually(lambda: engine.run_and_reset(prompts)[0][0]["num_cached"] == 200 // unit * unit, 30)
    assert "raykv" in engine.metrics()


def test_a_store_that_is_missing_at_the_first_step_is_looked_for(
    cluster, model, start_engine, connector, plain, prompt_of, same, unit, eventually
):
    import kvstore

    settings = {"name": "missing", "block_bytes": unit * 4096, "address": cluster.address}
    store = kvstore.start("16MiB", **settings)
    engine = start_engine(
        model, block_size=unit, among=BESIDE_NIXL[0], connector=connector(0, store="missing"), **NO_COUNTS
    ).wait_started()
    store.stop()
    prompts = [("missing", prompt_of(200, next(_seeds)), {})]
    wanted = one_by_one(plain, prompts)
    same(engine.run(prompts), wanted)
    store = kvstore.start("16MiB", **settings)
    try:

        def is_back():
            answers = engine.run(prompts)
            same(answers, wanted)
            assert engine.reset()
            return cached(answers) == full(prompts, unit)

        eventually(is_back, 60)
    finally:
        store.stop()


def test_two_of_these_connectors_are_refused(model, start_engine, connector, unit):
    from engines import EngineError

    engine = start_engine(model, block_size=unit, among=["RaykvConnector"] * 2, connector=connector(0))
    with pytest.raises(EngineError, match="wanted one RaykvConnector, got 2"):
        engine.wait_started()


def test_findings_that_never_come_hold_no_request_back_for_long(caplog):
    from vllm.v1.core.sched.output import SchedulerOutput

    connector, num_steps = scheduler_connector(), 0
    while connector.get_num_new_matched_tokens(request(), 0) == (None, False):
        assert connector.has_pending_push_work(), "an engine with a core process makes these steps by itself"
        connector.build_connector_meta(SchedulerOutput.make_empty())
        num_steps += 1
        assert num_steps < 1000
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)
        connector.build_connector_meta(SchedulerOutput.make_empty())
    assert not connector.has_pending_push_work()
    assert connector.request_finished(request(), []) == (False, None)
    assert sum("wanted each worker's findings" in record.getMessage() for record in caplog.records) == 1
