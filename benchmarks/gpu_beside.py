"""Loads beside matrix products, over many rounds: what `kvstore bench gpu` measures in few, with all else.

How long a product takes varies by some percent from round to round and from GPU to GPU, and what a load may add to it
is two. So this takes turns for longer, and the limit comes twice: what both say about each other is chance.

Run: `python -m benchmarks.gpu_beside [--rounds 30] [--json]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu_rows import Rows, rows_command
from kvstore.bench.gpu import BESIDE, SHAPES, make_setup, make_shape
from kvstore.bench.gpu_beside import beside_products

BLOCK_SIZE, NUM_BLOCKS = 16, 1024


def shape_rows(name: str, rounds: int) -> Rows:
    place = {"shape": name, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "direction": BESIDE}
    setup = make_setup(make_shape(name, BLOCK_SIZE), NUM_BLOCKS)
    return [place | row for row in beside_products(setup, rounds)]


def parts(rounds: int) -> Iterator[tuple[str, Callable[[], Rows]]]:
    for name in SHAPES:
        yield name, partial(shape_rows, name, rounds)


main = rows_command(__doc__, parts, rounds=30, most_rounds=1000, note="Twice so many count.")


if __name__ == "__main__":
    main()
