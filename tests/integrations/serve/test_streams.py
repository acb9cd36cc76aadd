"""A stream says at its end that it is not whole, whatever cut it off."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvstore.integrations.serve.streams import whole_or_error

DONE = "data: [DONE]\n\n"


def said(*chunks):
    """All chunks that a client gets; an error among the given ones is raised there."""

    async def given():
        for chunk in chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    async def got():
        return [chunk async for chunk in whole_or_error(given())]

    return asyncio.run(asyncio.wait_for(got(), 10))


@pytest.mark.parametrize("chunks", [["data: 1\n\n", DONE], ["data: 1\n\ndata: [DONE]\n\n"], [DONE], [DONE, ""]])
def test_a_whole_stream_is_passed_on_as_it_is(chunks):
    assert said(*chunks) == chunks


@pytest.mark.parametrize("cut", [[], [RuntimeError("the replica died")]])
@pytest.mark.parametrize("before", [[], ["data: 1\n\n"], ["data: 1\n\n", "data: 2\n\n"]])
def test_a_stream_that_was_cut_off_ends_with_an_error_of_openais_form(before, cut):
    *passed, last = said(*before, *cut)
    assert passed == before
    assert last.startswith("data: ")
    assert last.endswith("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 500
    assert "ask again" in error["message"]
    assert ("RuntimeError" in error["message"]) == bool(cut)
    assert "replica" not in error["message"], "what Ray says may name machines"


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_client_that_went_away_is_told_nothing(gone):
    with pytest.raises(type(gone)):
        said("data: 1\n\n", gone)


def test_a_client_that_goes_between_two_chunks_ends_the_engines_stream_at_once():
    ended = []

    async def given():
        try:
            while True:
                yield "data: 1\n\n"
        finally:
            ended.append(True)

    async def leave():
        stream = whole_or_error(given())
        await anext(stream)
        await stream.aclose()
        return list(ended)

    assert asyncio.run(asyncio.wait_for(leave(), 10)) == [True]
