"""End a stream of OpenAI's form with an error where its engine was lost; without one it looks like a whole answer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

logger = logging.getLogger(__name__)

_DONE = "data: [DONE]"
_LOST = "the engine was lost while it answered; the text is not whole: ask again"


async def whole_or_error(chunks: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Yield the chunks of a stream, and an error as its last one if it ends without `data: [DONE]`, or fails.

    The status of the answer was sent long before. OpenAI's clients raise an APIError for such a chunk.
    """
    is_whole, why = False, ""
    try:
        async with aclosing(chunks):  # At once when the client goes: the engine then aborts the request.
            async for chunk in chunks:
                is_whole = is_whole or chunk.strip().endswith(_DONE)
                yield chunk
    except Exception as error:  # noqa: BLE001 - whatever Ray raises, the client has to hear that it is not all.
        why = f" ({type(error).__name__})"
        logger.warning("a stream ended early: %s", error)
    if not is_whole:
        found = {"message": _LOST + why, "type": "InternalServerError", "param": None, "code": 500}
        yield f"data: {json.dumps({'error': found})}\n\n"
