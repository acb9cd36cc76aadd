"""How unpacking should deal out the planes of blocks: one after another, several at a time, or slot after slot.

    python -m benchmarks.studies.gpu_strips [--rounds N] [--json]

The kernel is the product's, with each style in turn in place of the one that `kernels.launch.style_of` chooses, which
is "chosen": its thresholds come from here. A strip is so many planes, "neighbours" or as far "apart" as can be; "all"
is no strip, slot after slot. Blocks are drawn at random, "one_in" so many of the cache's. "words" of 16 bytes are what
a block has in one plane. The rounds are shared out among seven places, in each of which everything is allocated anew,
because addresses matter: "of_limit" is the median over places of the time of one copy of the same bytes to the
style's, "least" the least of them. Every style's bytes are compared in every place.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from unittest import mock

import torch

from benchmarks.gpu_rows import Rows, rows_command
from kvstore.bench.gpu import (
    DEVICE_DELAY_CYCLES,
    NUM_PLACES,
    OTHER_BYTES,
    SHAPES,
    check_bytes,
    make_setup,
    make_shape,
    measure_ways,
)
from kvstore.bench.gpu_ways import Setup, Way, device_directions
from kvstore.blocks.shape import KVShape
from kvstore.kernels import launch
from kvstore.kernels.launch import Style, lie_together, style_of
from kvstore.kernels.module import INSIDE
from kvstore.kernels.spans import Spans, block_spans

WORD_BYTES = 16
#: Tokens of a block, blocks, and half of those that the cache has.
CASES = ((16, 1024, 1024), (16, 256, 1024), (64, 256, 256))
STYLES = {
    "all": Style(INSIDE, None),
    "1": Style(INSIDE, 1),
    **{f"{planes} neighbours": Style(INSIDE, planes) for planes in (2, 4, 8)},
    **{f"{planes} apart": Style(INSIDE, planes, apart=True) for planes in (2, 4, 8)},
}


def words_of(shape: KVShape) -> int:
    """Return the words that a block has in one plane of one layer."""
    return shape.block_bytes // shape.num_layers // shape.num_planes // WORD_BYTES


def spans_of(setup: Setup) -> Spans:
    """Return the list that unpacks the blocks of a setup."""
    count = len(setup.block_ids)
    return block_spans(setup.copier.plan.paging, setup.block_ids, range(count), count).to_unpack()


def chosen_style(shape: KVShape, spans: Spans) -> Style:
    """Return the style in which the product unpacks spans of whole blocks."""
    return style_of(False, words_of(shape), lie_together(spans, 0, len(spans), shape.block_size))


def unpacking(setup: Setup, spans: Spans, style: Style) -> Way:
    """Return what unpacks the blocks of a setup in a style."""
    copier, current = setup.copier, torch.cuda.current_stream()
    placed = copier.place(spans)
    with mock.patch.object(launch, "style_of", return_value=style):
        work = copier.prepare(False, placed, setup.device, 0, None)

    def way() -> torch.cuda.Stream:
        copier.launch_prepared(work, current.cuda_stream, placed.address)
        return current

    return way


def case_rows(name: str, block_size: int, num_blocks: int, half: int, rounds: int) -> Rows:
    shape, per_place = make_shape(name, block_size), -(-rounds // NUM_PLACES)
    other = torch.zeros(OTHER_BYTES, dtype=torch.uint8, device="cuda")
    no_host = torch.empty((0, shape.block_bytes), dtype=torch.uint8)
    places = []
    for _ in range(NUM_PLACES):
        setup = make_setup(shape, half, no_host).first(num_blocks)
        spans = spans_of(setup)
        chosen = chosen_style(shape, spans)
        ways = {"limit": dict(device_directions(setup))["unpack"]["limit"]}
        ways |= {style_name: unpacking(setup, spans, style) for style_name, style in STYLES.items()}
        places.append(measure_ways(ways, other, per_place, DEVICE_DELAY_CYCLES))
        for style_name in STYLES:
            check_bytes(setup, "unpack", ways[style_name])
        del setup, ways
        torch.cuda.empty_cache()
    return [
        {
            "shape": name, "block_size": block_size, "num_blocks": num_blocks, "one_in": 2 * half // num_blocks,
            "words": words_of(shape), "way": style_name, "of_limit": round(median, 3), "least": round(least, 3),
            "chosen": STYLES[style_name] == chosen,
        }
        for style_name, (median, least) in shares(places).items()
    ]  # fmt: skip


def shares(places: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, float]]:
    """Return of every way the median and the least, over places, of the limit's time to its own.

    Args:
        places: of each the seconds of every way, and of "limit".
    """
    medians = [{way: statistics.median(seconds) for way, seconds in place.items()} for place in places]
    ratios = {way: [place["limit"] / place[way] for place in medians] for way in medians[0] if way != "limit"}
    return {way: (statistics.median(found), min(found)) for way, found in ratios.items()}


def parts(rounds: int) -> Iterator[tuple[str, partial[Rows]]]:
    for name in SHAPES:
        for case in CASES:
            yield f"{name}, {case[1]} blocks of {case[0]} tokens", partial(case_rows, name, *case, rounds)


main = rows_command(__doc__, parts, rounds=21)


if __name__ == "__main__":
    main()
