"""A stream says at its end that it is not whole, whatever cut it off."""

from __future__ import annotations

import asyncio
import contextlib
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


def test_an_error_begins_on_a_line_of_its_own_where_the_stream_was_cut_within_one():
    for before, begins in (("data: {", "\n\ndata: "), ("data: 1\n", "data: ")):
        *_, last = said(before, "", RuntimeError("the replica died"))
        assert last.startswith(begins)


async def unclosable():
    try:
        while True:
            yield "data: 1\n\n"
    finally:
        raise ConnectionError("the replica is gone")


def test_a_client_that_goes_hears_nothing_of_a_stream_that_cannot_be_closed(caplog):
    async def leave():
        stream = whole_or_error(unclosable())
        await anext(stream)
        await stream.aclose()

    asyncio.run(asyncio.wait_for(leave(), 10))
    assert "could not be closed: the replica is gone" in caplog.text


def test_a_client_that_goes_hears_nothing_of_an_error_in_place_of_the_cancelling():
    got = []

    async def given():
        try:
            yield "data: 1\n\n"
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("as handles of Ray Serve raise it") from None

    async def consume():
        got.extend([chunk async for chunk in whole_or_error(noted(given()))])

    async def noted(chunks):
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                got.append(chunk)
                yield chunk

    async def leave():
        task = asyncio.create_task(consume())
        while not got:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(asyncio.wait_for(leave(), 10))
    assert got == ["data: 1\n\n"]
