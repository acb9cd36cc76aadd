"""What counts for a model's id and becomes another while it is wrapped is noticed, whatever kind of thing it is."""

from __future__ import annotations

import functools
import importlib.util
import sys

import pytest
import torch

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers.modules import ModuleMarks

GREEDY = {"max_new_tokens": 4, "do_sample": False}

CODE = """
import functools
import numpy, torch

def around():
    factor = 1.0
    def put(value):
        nonlocal factor
        factor = value
    class Around(torch.nn.Module):
        def forward(self, x):
            return factor * x
    return Around, put

Around, put = around()

class Mine(Around):
    by, several, named = 1.0, [1.0, [1.0]], {"by": {"by": 1.0}}
    array, tensor = numpy.ones(2), torch.ones(2)

    class Config:
        by = 1.0

    def __init__(self):
        super().__init__()
        self.held = [1.0, {"by": [torch.ones(2)]}]

    @property
    def one(self):
        return 1.0

    @staticmethod
    def two():
        return 1.0

    @classmethod
    def three(cls):
        return 1.0

    def scaled(self, x, by):
        return by * x

    four = functools.partialmethod(scaled, by=1.0)

    def forward(self, x, by=1.0, many=[1.0], *, named={"by": 1.0}):
        return super().forward(by * x)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of one class, with all that a program's classes have."""
    path = tmp_path / "changing.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("changing", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "changing", module)
    spec.loader.exec_module(module)
    return module


def another_class_within(mine, _):
    mine.Mine.Config.by = 3.0


def another_call(mine, _):
    call = torch.nn.Module.__call__
    mine.Mine.__call__ = lambda self, *given: 3 * call(self, *given)


def another_base(mine, _):
    mine.Mine.__bases__ = (type("Other", (mine.Around,), {}),)


def other_code(mine, _):
    mine.Mine.one.fget.__code__ = (lambda self: 3.0).__code__


CHANGES = {
    "attribute": lambda mine, _: setattr(mine.Mine, "by", 3.0),
    "attribute of another type": lambda mine, _: setattr(mine.Mine, "by", 1),
    "attribute more": lambda mine, _: setattr(mine.Mine, "more", 1),
    "attribute less": lambda mine, _: delattr(mine.Mine, "by"),
    "list": lambda mine, _: mine.Mine.several[1].append(3.0),
    "dict": lambda mine, _: mine.Mine.named["by"].update(by=3.0),
    "array": lambda mine, _: mine.Mine.array.fill(3.0),
    "tensor": lambda mine, _: mine.Mine.tensor.fill_(3.0),
    "tensor by its data": lambda mine, _: mine.Mine.tensor.data.fill_(3.0),
    "class within": another_class_within,
    "property": lambda mine, _: setattr(mine.Mine, "one", property(lambda self: 3.0)),
    "staticmethod": lambda mine, _: setattr(mine.Mine, "two", staticmethod(lambda: 3.0)),
    "classmethod": lambda mine, _: setattr(mine.Mine, "three", classmethod(lambda cls: 3.0)),
    "partialmethod": lambda mine, _: vars(mine.Mine)["four"].keywords.update(by=3.0),
    "__call__": another_call,
    "base": another_base,
    "code in place": other_code,
    "default in place": lambda mine, _: setattr(mine.Mine.forward, "__defaults__", (3.0, [1.0])),
    "content of a default": lambda mine, _: mine.Mine.forward.__defaults__[1].append(3.0),
    "keyword default": lambda mine, _: mine.Mine.forward.__kwdefaults__["named"].update(by=3.0),
    "value around": lambda mine, _: mine.put(3.0),
    "setting of an object": lambda _, act: act.held.append(3.0),
    "tensor in a setting": lambda _, act: act.held[1]["by"][0].fill_(3.0),
    "forward of one object": lambda _, act: setattr(act, "forward", functools.partial(torch.mul, 3.0)),
}


def with_act(build, module):
    model = build()
    for layer in model.model.layers:
        layer.mlp.act_fn = module.eval()
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_before_it_is_saved_or_loaded(build, tokens, wrap, mine, change):
    act = mine.Mine()
    model, prompt = with_act(build, act), tokens(40)
    cached = wrap(model)
    for _ in range(2):
        cached.generate(prompt, **GREEDY)
    before = cached.stats.num_saved_blocks
    CHANGES[change](mine, act)
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(prompt, **GREEDY)
    assert cached.stats.num_saved_blocks == before


def test_code_of_a_library_that_is_replaced_in_place_is_noticed(build, tokens, wrap, monkeypatch):
    model, prompt = build(), tokens(40)
    cached = wrap(model)

    def forward(self, x):
        return 3 * x

    monkeypatch.setattr(type(model.model.layers[0].mlp).forward, "__code__", forward.__code__)
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(prompt, **GREEDY)
    monkeypatch.undo()
    cached.generate(prompt, **GREEDY)


def test_values_that_are_replaced_by_equal_ones_are_no_change(build, tokens, wrap, mine):
    cached = wrap(with_act(build, mine.Mine()))
    mine.Mine.several = [1.0, [1.0]]
    mine.Mine.named = {"by": {"by": float("1")}}
    mine.put(float("1"))
    for loaded in (0, 32):
        cached.generate(tokens(40), **GREEDY)
        assert cached.stats.num_loaded_tokens == loaded


def test_generating_changes_nothing_that_is_looked_at(build, tokens, monkeypatch):
    model = build()
    marks = ModuleMarks(model)
    model.generate(tokens(40), **GREEDY)
    monkeypatch.setattr(marks, "_look_at", None)  # It would have to look again, which takes long.
    assert marks.are_of(model)
