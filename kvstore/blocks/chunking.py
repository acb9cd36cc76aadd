"""Divide a READ of many blocks. A segment is claimed as one; a chunk is read and reported as one."""

from __future__ import annotations

_FIRST_SEGMENT_BLOCKS, _GROWTH = 128, 16
#: How many times shorter the last chunk between stages is than the others.
_LAST_OF_STAGE = 4


def plan_chunks(num_blocks: int, chunk_blocks: int) -> list[int]:
    """Return the end of each chunk: short ones first and last, full ones between.

    Copying a chunk out overlaps with reading the next one. So the first chunk decides when copying begins, and the
    last one how much copying is left at the end. Toward the end each chunk is half of the one before: copying one
    takes about as long as reading the next. A READ no longer than the first chunk is not divided.
    """
    first, last, ends, at = max(1, chunk_blocks // 4), max(1, chunk_blocks // 16), list[int](), 0
    if num_blocks <= first:
        return [num_blocks] if num_blocks else []
    size = first
    while at < num_blocks:
        left = num_blocks - at
        at += min(size, left if 2 * left <= 3 * last else -(-left // 2))
        ends.append(at)
        size = min(2 * size, chunk_blocks)
    return ends


def plan_stage_chunks(num_blocks: int, chunk_blocks: int) -> list[int]:
    """Return the end of each chunk of a READ between stages: full ones, and a short one last.

    Unpacking is far faster than the lane, so a report per small chunk costs more than it saves. But unpacking the
    last chunk overlaps with nothing, so that one is short.
    """
    last = max(1, min(chunk_blocks, num_blocks) // _LAST_OF_STAGE)
    return [*range(chunk_blocks, num_blocks - last, chunk_blocks), num_blocks - last, num_blocks][-num_blocks:]


def plan_segments(chunk_ends: list[int]) -> list[list[int]]:
    """Group chunks into segments, each about sixteen times as long as the one before.

    The slots of the first segment are claimed while the peer is asked, those of a later one while the segment before
    is read: nothing waits for the claim of thousands of slots. Between two segments a lane may be idle for a round
    trip, so there are few segments. Each is returned as its part of `chunk_ends`.
    """
    segments: list[list[int]] = [[]]
    begin, size = 0, _FIRST_SEGMENT_BLOCKS
    for end in chunk_ends:
        if segments[-1] and segments[-1][-1] - begin >= size:
            begin, size = segments[-1][-1], _GROWTH * size
            segments.append([])
        segments[-1].append(end)
    return segments if chunk_ends else []
