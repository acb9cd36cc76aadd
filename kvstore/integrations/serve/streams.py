"""End a stream of OpenAI's form with an error where its engine was lost; without one it looks like a whole answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator

logger = logging.getLogger(__name__)

_DONE = "data: [DONE]"
_LOST = "the engine was lost while it answered; the text is not whole: ask again"


async def whole_or_error(chunks: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Yield the chunks of a stream, and an error as its last one if it ends without `data: [DONE]`, or fails.

    The status of the answer was sent long before. OpenAI's clients raise an APIError for such a chunk.
    """
    last, is_whole, why, num_cancels = "\n", False, "", _num_cancels()
    try:
        try:
            async for chunk in chunks:
                is_whole, last = is_whole or chunk.strip().endswith(_DONE), chunk or last
                yield chunk
        except Exception as error:
            if _num_cancels() > num_cancels:  # The client has gone; Ray raises another error for that.
                raise asyncio.CancelledError from error
            why = f" ({type(error).__name__})"
            logger.warning("a stream ended early: %s", error)
    finally:
        await _close(chunks)  # At once when the client goes: the engine then aborts the request.
    if not is_whole:
        found = {"message": _LOST + why, "type": "InternalServerError", "param": None, "code": 500}
        begin = "" if last.endswith("\n") else "\n\n"  # It is no part of a line that was cut off.
        yield f"{begin}data: {json.dumps({'error': found})}\n\n"


async def _close(chunks: AsyncGenerator[str, None]) -> None:
    """Close a stream; its errors are logged, because nobody hears them any more."""
    num_cancels = _num_cancels()
    try:
        await chunks.aclose()
    except Exception as error:
        logger.warning("a stream could not be closed: %s", error)
        if _num_cancels() > num_cancels:
            raise asyncio.CancelledError from error


def _num_cancels() -> int:
    """Return how often the task that runs this was cancelled."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
