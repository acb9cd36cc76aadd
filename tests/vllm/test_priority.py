"""A request says how much its blocks matter; one that says it wrongly is served as any other."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from sides import SIZE, request, scheduler_side

from kvstore.blocks.priority import Priority


def plan_of(params, name="r"):
    """Let a request be planned whose two full blocks are computed in this step; return the save."""
    side, asked = scheduler_side(), request(name, kv_transfer_params=params)
    assert side.match(asked, 0) == (0, False)
    new = SimpleNamespace(req_id=name, block_ids=([1, 2, 3],), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    (save,) = side.plan(
        SimpleNamespace(
            scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens={name: 2 * SIZE + 8},
            total_num_scheduled_tokens=2 * SIZE + 8, preempted_req_ids=None,
        )
    ).saves  # fmt: skip
    return pickle.loads(pickle.dumps(save))


def test_a_load_has_the_priority_of_its_request():
    for params, priority in ((None, Priority.NORMAL), ({"raykv_priority": "low"}, Priority.LOW)):
        side, asked = scheduler_side(), request("r", kv_transfer_params=params)
        side.match(asked, 0)
        side.allocated(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2],), blocks=[[]]), 2 * SIZE)
        (load,) = side.next_plan.loads
        assert (len(load.hashes), pickle.loads(pickle.dumps(load)).priority) == (2, priority)


@pytest.mark.parametrize(
    ("params", "priority", "priority_s"),
    [
        (None, Priority.NORMAL, None),
        ({}, Priority.NORMAL, None),
        ({"raykv_priority": None, "raykv_priority_s": None}, Priority.NORMAL, None),
        ({"raykv_priority": "low"}, Priority.LOW, None),
        ({"raykv_priority": "high", "raykv_priority_s": 600}, Priority.HIGH, 600.0),
    ],
)
def test_a_save_has_what_its_request_says(params, priority, priority_s, caplog):
    save = plan_of(params)
    assert (len(save.hashes), save.priority, save.priority_s) == (2, priority, priority_s)
    assert not caplog.records


@pytest.mark.parametrize(
    "params",
    [
        {"raykv_priority": "urgent"},
        {"raykv_priority": 2},
        {"raykv_priority": ["low"]},
        {"raykv_priority": "x" * 100_000},
        {"raykv_priority": "low", "raykv_priority_s": "600"},
        {"raykv_priority": "low", "raykv_priority_s": -1},
        {"raykv_priority": "high", "raykv_priority_s": float("nan")},
        {"raykv_priority": "high", "raykv_priority_s": True},
        {"raykv_priority_s": 600},
        {"raykv_priority": "normal", "raykv_priority_s": 600},
    ],
)
def test_a_request_with_a_bad_value_is_served_as_any_other_after_one_warning(params, caplog):
    save = plan_of(params)
    assert (len(save.hashes), save.priority, save.priority_s) == (2, Priority.NORMAL, None)
    (warning,) = caplog.records
    assert "kv_transfer_params: raykv_priority" in warning.getMessage()
    assert len(warning.getMessage()) < 400
