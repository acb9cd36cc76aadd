"""A copy of a model with shorter sliding windows, to try on a few tokens what happens behind a window."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig


def narrowed(model: Any, window: int) -> Any:
    """Return a copy of a model that shares its weights, buffers and hooks, and has shorter sliding windows.

    Args:
        model: stays as it is; other threads may run it meanwhile.
        window: the most tokens that a layer with a sliding window attends to.
    """
    configs, modules = dict[int, Any](), dict[int, Any]()

    def copied(module: Any) -> Any:
        if id(module) not in modules:
            made = modules[id(module)] = copy.copy(module)
            for name, value in vars(module).items():
                if isinstance(value, PretrainedConfig):
                    vars(made)[name] = copy.deepcopy(value, configs)
            vars(made)["_modules"] = {
                name: None if each is None else copied(each) for name, each in module._modules.items()
            }
        return modules[id(module)]

    found = copied(model)
    for holder in (*configs.values(), *modules.values()):
        if isinstance(holder, PretrainedConfig):
            own = getattr(holder, "sliding_window", None)  # It may be stored under another name.
        else:
            own = vars(holder).get("sliding_window") if isinstance(holder, torch.nn.Module) else None
        if type(own) is int and own > window:
            holder.sliding_window = window
    return found
