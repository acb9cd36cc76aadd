"""A copy of a model with shorter sliding windows, to try on a few tokens what happens behind a window."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from transformers import PretrainedConfig


def narrowed(model: Any, window: int) -> Any:
    """Return a copy of a model that shares its weights and buffers, and has shorter sliding windows.

    Args:
        model: stays as it is; other threads may run it meanwhile.
        window: the most tokens that a layer with a sliding window attends to.
    """
    made = copy.deepcopy(model, {id(each): each for each in chain(model.parameters(), model.buffers())})
    modules = list(made.modules())
    configs = [each for module in modules for each in vars(module).values() if isinstance(each, PretrainedConfig)]
    for holder in (*modules, *configs, *(config.get_text_config(decoder=True) for config in configs)):
        own = getattr(holder, "sliding_window", None)  # A config may store it under another name.
        if type(own) is int and own > window:
            holder.sliding_window = window
    return made
