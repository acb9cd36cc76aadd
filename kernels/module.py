"""Load the .cu files of this folder: CuPy compiles each once per process and device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple


class Threads(NamedTuple):
    """The template arguments of a kernel of pack.cu, except the word."""

    is_inside: bool
    """Whether a thread's words lie in one plane of a span; else each lies in another plane."""

    num_words: int
    """Words that a thread copies at once."""

    num_threads: int
    """The most threads of a thread block."""

    num_ctas: int
    """Thread blocks per multiprocessor for which the registers must suffice."""

    def kernel(self, to_slots: bool, word: int) -> str:
        """Return the name of the kernel for words of `word` bytes."""
        verb = "pack" if to_slots else "unpack"
        counts = f"{self.num_words}, {self.num_threads}, {self.num_ctas}"
        return f"{verb}_spans<{WORDS[word]}, {str(self.is_inside).lower()}, {counts}>"


ACROSS = Threads(False, 4, 256, 6)
INSIDE = Threads(True, 2, 128, 16)
WORDS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
INDEX_TYPES = {4: "int", 8: "long long"}
#: Every kernel of a file: templates with their arguments.
KERNELS = {
    "pack.cu": [
        threads.kernel(to_slots, word) for threads in (ACROSS, INSIDE) for to_slots in (True, False) for word in WORDS
    ],
    "index.cu": [
        f"{name}<{index}>"
        for name in ("slots_to_pages", "pages_to_slots", "repack_pages", "last_pages")
        for index in INDEX_TYPES.values()
    ],
}
#: Modules unload with their last reference, so this list keeps them.
_loaded: list[Any] = []
OPTIONS = ("-std=c++17",)


def source_of(file: str) -> Path:
    """Return the path of a .cu file."""
    return Path(__file__).with_name(file)


@functools.cache
def load(file: str, device: int) -> dict[str, int]:
    """Compile a file for a device; the first call takes about a second.

    Args:
        file: a key of `KERNELS`.
        device: index of the CUDA device.

    Returns:
        Handles of the kernels by name, with the template's arguments; valid as long as the process.

    Raises:
        ImportError: CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as cause:
        raise ImportError(
            "copies of CUDA caches want CuPy, which is not installed; in a checkout of raykv, pip install '.[cuda13]' "
            "or '.[cuda12]', whichever the driver supports"
        ) from cause
    names = KERNELS[file]
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source_of(file).read_text(), options=OPTIONS, name_expressions=names)
        kernels = {name: module.get_function(name).kernel for name in names}
    _loaded.append((module, kernels))
    return {name: kernel.ptr for name, kernel in kernels.items()}
