"""What a request brings along ends no engine: it goes on without, and others with the store."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from sides import request, scheduler_side


@pytest.mark.parametrize("params", ["abc", "", 5, 0, 1.5, True, False, ["do_remote_decode"], [], b"x"])
def test_params_that_are_no_mapping_count_as_none(params, caplog):
    side, asked = scheduler_side(), request(kv_transfer_params=params)
    side.begin(asked)
    assert side.match(asked, 0) == (0, False)
    assert side.stats.total()["num_bad_tickets"] == 1
    assert not side.tracked["r"].may_publish
    assert side.tracked["r"].may_save, "all else goes on as it would"
    assert "wanted a mapping" in caplog.text
    assert side.ended(asked, []) == (False, None)


def test_what_came_along_is_logged_in_a_few_characters(caplog):
    side = scheduler_side()
    for at, params in enumerate(
        ["x" * 100_000, {"do_remote_prefill": True, "raykv_ticket": {"parts": ["!" * 100_000]}}]
    ):
        side.begin(request(str(at), kv_transfer_params=params))
    assert side.stats.total()["num_bad_tickets"] == 2
    assert len(caplog.text) < 2000


class Unsure:
    def __bool__(self):
        raise RuntimeError("as an array's")


@pytest.mark.parametrize("where", ["params", "question"])
def test_no_error_about_one_request_reaches_vllm(where, caplog):
    side = scheduler_side()
    params = {"do_remote_decode": Unsure()} if where == "params" else {}
    asked = request(kv_transfer_params=params)
    if where == "question":
        del asked.prompt_token_ids
    for _ in range(2):  # A second of the name may come when the first has ended.
        side.begin(asked)
        for _ in range(3):  # vLLM may ask again and again.
            assert side.match(asked, 0) == (0, False)
        side.allocated(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 0)
        assert not side.tracked
        assert side.ended(asked, [1, 2, 3]) == (False, None)
    assert side.stats.total()["num_request_errors"] == 2
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2, "one each, not one for each question"
    assert all(record.exc_info for record in errors)
    good = request()
    side.begin(good)
    assert side.tracked["r"].may_load
    assert not side.untracked


def test_requests_with_media_that_nothing_tells_apart_go_on_without_the_store(caplog):
    side = scheduler_side(names_media=False)
    params = {"do_remote_decode": True}
    for name in ("a", "b"):
        asked = request(name, mm_features=[object()], kv_transfer_params=params)
        for _ in range(2):
            side.begin(asked)
            assert side.match(asked, 0) == (0, False)
        assert side.ended(asked, [1, 2, 3]) == (False, None)
    assert not side.untracked
    assert side.stats.total()["num_unnamed_media_requests"] == 2
    assert caplog.text.count("--mm-processor-cache-gb") == 1
    side.begin(request("text"))
    assert side.tracked["text"].may_save


def test_media_without_their_data_go_on_without_the_store_unless_names_are_trusted(caplog):
    """vLLM takes the uuid that a client gave for the name of a medium."""
    nameless = [SimpleNamespace(data=None, identifier="mine")]
    side = scheduler_side()
    side.begin(request("a", mm_features=nameless))
    assert side.untracked == {"a"}
    assert "--mm-processor-cache-type" in caplog.text
    trusting = scheduler_side(options={"trust_media_uuids": True})
    trusting.lookups.ask = lambda question: None
    trusting.begin(request("a", mm_features=nameless))
    assert trusting.tracked["a"].media == {0: b""}


def test_a_medium_of_an_unknown_form_ends_no_engine():
    side = scheduler_side()
    side.begin(request("a", mm_features=[object()]))
    assert side.untracked == {"a"}
    assert side.stats.total()["num_request_errors"] == 1
