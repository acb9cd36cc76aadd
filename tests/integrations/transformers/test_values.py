"""Whatever a program's code holds counts for a model's id, or is refused: nothing is passed over in silence."""

from __future__ import annotations

import enum
import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.identity import kv_shape, namespace_of

Module = torch.nn.Module


def space(model):
    return namespace_of(model, kv_shape(model, 16)[0], None, b"").digest


def cached_method(a):
    class Mine(Module):
        @functools.cache  # noqa: B019
        def factor(self):
            return a

        def forward(self, x):
            return self.factor() * x

    return Mine()


def partial_method(a):
    class Mine(Module):
        def scaled(self, by, x):
            return by * x

        forward = functools.partialmethod(scaled, a)

    return Mine()


def function_as_default(a):
    def act(x):
        return a * x

    class Mine(Module):
        def forward(self, x, act=act):
            return act(x)

    return Mine()


def tensor_as_default(a):
    by = torch.tensor(a)

    class Mine(Module):
        def forward(self, x, by=by):
            return by * x

    return Mine()


def class_within(a):
    class Mine(Module):
        class Config:
            by = a

        def forward(self, x):
            return self.Config.by * x

    return Mine()


def class_that_a_tool_made(a):
    class Mine(Module):
        config = types.new_class("Config", (), {}, lambda held: held.update(by=a))

        def forward(self, x):
            return self.config.by * x

    return Mine()


def private_attribute(a):
    class Mine(Module):
        _by = a

        def forward(self, x):
            return self._by * x

    return Mine()


def tensor_of_class(a):
    class Mine(Module):
        by = torch.tensor(a)

        def forward(self, x):
            return self.by * x

    return Mine()


def static_property(a):
    class Mine(Module):
        @property
        def by(self):
            return a

        @staticmethod
        def and_by():
            return a

        def forward(self, x):
            return self.by * self.and_by() * x

    return Mine()


def under_autocast(a):
    class Mine(Module):
        @torch.autocast("cpu", dtype=torch.bfloat16 if a == 1 else torch.float16)
        def forward(self, x):
            return x

    return Mine()


class Kind(enum.Enum):
    ONE = functools.partial(torch.mul, 1.0)
    OTHER = functools.partial(torch.mul, -4.0)


class Held(Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return x


class Slot(Module):
    __slots__ = ("by",)

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x


class Float(float):
    def __repr__(self):
        return "float"


class Fails(float):
    def __repr__(self):
        raise ValueError("no")

    __str__ = __hash__ = __eq__ = __repr__


SETTINGS = {
    "tensor in a tuple in a tuple": lambda a: ((torch.tensor(a),),),
    "list of tensors": lambda a: [torch.tensor(a)],
    "dict of tensors": lambda a: {"a": torch.tensor(a)},
    "complex": lambda a: complex(0, a),
    "array": lambda a: np.array([a]),
    "dict": lambda a: {"a": a},
    "set of a set": lambda a: {frozenset({a, "text"})},
    "bytes": lambda a: [str(a).encode()],
    "enum": lambda a: Kind.ONE if a == 1 else Kind.OTHER,
    "function": lambda a: lambda x: a * x,
    "partial": lambda a: functools.partial(torch.mul, a),
    "plain kind": lambda a: 1 if a == 1 else 1.0,
    "bool": lambda a: [1] if a == 1 else [True],
}
COUNTED = [
    cached_method, partial_method, function_as_default, tensor_as_default, class_within, class_that_a_tool_made,
    private_attribute, tensor_of_class, static_property, under_autocast,
]  # fmt: skip
CASES = {make.__name__: make for make in COUNTED} | {
    f"setting: {name}": lambda a, make=make: Held(make(a)) for name, make in SETTINGS.items()
}
REFUSED = {
    "a float with a repr of its own": lambda: Held(Float(1.0)),
    "a float whose repr fails": lambda: Held(Fails(1.0)),
    "an object": lambda: Held(types.SimpleNamespace(a=1.0)),
    "an object deep inside": lambda: Held({"a": [(types.SimpleNamespace(a=1.0),)]}),
    "an object in a partial": lambda: Held(functools.partial(torch.mul, types.SimpleNamespace(a=1.0))),
    "a module that is not of the model": lambda: Held([torch.nn.Linear(2, 2)]),
    "an array of objects": lambda: Held(np.array([object()])),
    "a quantised tensor": lambda: Held([torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)]),
    "a slot": lambda: Slot(1.0),
}


def with_act(build, module):
    model = build(initializer_range=0.2)
    for layer in model.model.layers:
        layer.mlp.act_fn = module.eval()
    return model


@pytest.mark.parametrize("case", CASES)
def test_unlike_models_have_unlike_ids_and_like_ones_share(build, case):
    spaces = [space(with_act(build, CASES[case](a))) for a in (1.0, -4.0, 1.0)]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("case", REFUSED)
def test_what_could_hold_anything_is_refused_by_name(build, wrap, case):
    field = r"by" if case == "a slot" else r"model\.layers\.0\.mlp\.act_fn\.held"
    with pytest.raises(UnsupportedModel, match=rf"{field}.*pass model_id"):
        wrap(with_act(build, REFUSED[case]()))
    wrap(with_act(build, REFUSED[case]()), model_id="mine")


class Times:
    __name__ = __qualname__ = "f"

    def __init__(self, by, forward):
        self.by, self.forward = by, forward

    def __call__(self, module, x):
        return self.by * self.forward(module, x)


def patch_by_partialmethod(kind, forward, a, monkeypatch):
    monkeypatch.setattr(kind, "forward", functools.partialmethod(lambda self, by, x: by * forward(self, x), a))


def patch_by_object(kind, forward, a, monkeypatch):
    monkeypatch.setattr(kind, "forward", torch.no_grad()(Times(a, forward)))


def patch_by_attribute(kind, forward, a, monkeypatch):
    monkeypatch.setattr(kind, "by", a, raising=False)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.by * forward(self, x))


def patch_by_default(kind, forward, a, monkeypatch):
    def patched(self, x, by=[a]):  # noqa: B006
        return by[0] * forward(self, x)

    monkeypatch.setattr(kind, "forward", patched)


def patch_code(kind, forward, a, monkeypatch):
    def three(self, x):
        return 3 * x

    def four(self, x):
        return 4 * x

    monkeypatch.setattr(forward, "__code__", (three if a == 1 else four).__code__)


PATCHES = [patch_by_partialmethod, patch_by_object, patch_by_attribute, patch_by_default, patch_code]


@pytest.mark.parametrize("patch", PATCHES)
def test_patches_of_a_librarys_class_count_or_are_refused(build, monkeypatch, patch):
    kind, spaces = type(build().model.layers[0].mlp), [space(build())]
    for a in (1.0, -4.0):
        with monkeypatch.context() as context:
            patch(kind, kind.forward, a, context)
            if patch is patch_by_object:
                with pytest.raises(UnsupportedModel, match=r"forward: an object of .*pass model_id"):
                    space(build())
                a *= 10
            spaces.append(a if patch is patch_by_object else space(build()))
    assert len(set(spaces)) == 3
    assert space(build()) == spaces[0]


UNLIKE_JSON = {"set": {1, 2}, "tensor": torch.ones(2), "keys of two kinds": {1: 2, "a": 3}, "repr": Fails(1.0)}


@pytest.mark.parametrize("kind", UNLIKE_JSON)
def test_a_config_that_json_cannot_hold_is_refused_by_name(build, wrap, kind):
    model = build()
    model.config.thing = {"inner": UNLIKE_JSON[kind]} if kind == "repr" else UNLIKE_JSON[kind]
    with pytest.raises(UnsupportedModel, match=r"got thing of .*take it out of the config"):
        wrap(model)


STOCK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("models", sys.argv[1])
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
import torch, transformers
from kvstore.integrations.transformers.identity import kv_shape, namespace_of

def show(name, model):
    print(name, namespace_of(model, kv_shape(model, 16)[0], None, b"").digest.hex())

for family in models.FAMILIES:
    show(family, models.build(family))
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
sizes["num_key_value_heads"] = 4
tokens = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
for family in ("Gemma", "Phi", "OPT", "Bloom", "Falcon", "Olmo2", "Mixtral", "StableLm"):
    torch.manual_seed(0)
    more = {"head_dim": 8} if family == "Gemma" else {}
    config = getattr(transformers, family + "Config")(**sizes, **tokens, **more)
    show(family, getattr(transformers, family + "ForCausalLM")(config).eval())

import enum, functools

class Kinds(enum.Enum):
    SOME = frozenset({"full", "causal", "rope"})
    CODE = functools.partial(torch.relu)

class Mine(torch.nn.Module):
    names = {"full", "causal", "rope"}
    def __init__(self):
        super().__init__()
        self.held = [Kinds.SOME, {"a": Kinds.CODE}, {"x", "y", "z"}]
    def forward(self, x, names=frozenset({"one", "other", "third"})):
        return x if "full" in {"full", "causal", "rope"} else -x

model = models.build()
model.model.layers[0].mlp.act_fn = Mine().eval()
show("mine", model)
"""


def test_stock_models_and_plain_ones_share_over_processes(tmp_path):
    path = tmp_path / "stock.py"
    path.write_text(STOCK)
    answers = []
    for seed in ("1", "2"):
        command = [sys.executable, str(path), str(Path(__file__).parent / "conftest.py")]
        given = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.split())
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2 * 18
