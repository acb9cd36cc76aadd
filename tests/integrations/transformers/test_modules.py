"""What a model's modules are counts, whatever its config says; and so does the code of classes of a user's own."""

from __future__ import annotations

import copy
import enum
import functools
import importlib.util
import sys

import numpy as np
import pytest
import torch
import transformers

from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.modules import modules_digest, sources_of

GREEDY = {"max_new_tokens": 4, "do_sample": False}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "GPTNeoX", "GPT2"]


def test_a_config_that_was_edited_after_the_model_was_built(build, tokens, wrap):
    edited, built, prompt = build(rms_norm_eps=1e-6), build(rms_norm_eps=0.5), tokens(40)
    edited.config.rms_norm_eps = 0.5  # Of which its modules know nothing.
    cached, other = wrap(edited), wrap(built)
    assert cached.space.digest != other.space.digest
    cached.generate(prompt, **GREEDY)
    assert torch.equal(other.generate(prompt, **GREEDY), built.generate(prompt, **GREEDY))
    assert other.stats.num_loaded_tokens == 0


def another_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU().eval()


def another_scale(model):
    model.model.layers[1].self_attn.scaling = 0.5


def a_setting_more(model):
    model.model.layers[1].mlp.limit = 7.0


def another_class(model):
    class Twice(type(model.model.norm)):
        def forward(self, *args):
            return 2 * super().forward(*args)

    model.model.norm.__class__ = Twice


CHANGES = [another_activation, another_scale, a_setting_more, another_class]


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_changed_are_noticed(build, tokens, wrap, change):
    model, prompt = build(), tokens(40)
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    change(model)
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(prompt, **GREEDY)
    renewed = wrap(model)
    assert renewed.space.digest != cached.space.digest
    assert torch.equal(renewed.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))
    assert renewed.stats.num_loaded_tokens == 0


def test_a_shared_module_that_becomes_another_ones(build, tokens, wrap):
    model, other, prompt = build(), build(), tokens(40)
    for each, shared in ((model, 0), (other, 1)):
        each.model.layers[2].mlp = each.model.layers[shared].mlp
    cached = wrap(model)
    assert cached.space.digest != wrap(other).space.digest
    cached.generate(prompt, **GREEDY)
    model.model.layers[2].mlp = model.model.layers[1].mlp
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)


def test_a_module_that_was_replaced_by_an_equal_one_is_no_change(build, tokens, wrap):
    model, prompt = build(), tokens(40)
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    for layer in model.model.layers:
        layer.mlp.act_fn = type(layer.mlp.act_fn)().eval()
    for loaded in (32, 64):
        cached.generate(prompt, **GREEDY)
        assert cached.stats.num_loaded_tokens == loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_running_a_model_does_not_change_it(build, tokens, family, tmp_path):
    model = build(family)
    digest = modules_digest(model)
    model.generate(tokens(40), **GREEDY)
    assert modules_digest(model) == digest
    model.compile(backend="eager")
    assert modules_digest(model.eval()) == digest
    model.set_attn_implementation("eager")
    assert modules_digest(model) == digest
    model = build(family)
    model.save_pretrained(tmp_path)
    assert modules_digest(type(model).from_pretrained(tmp_path, dtype="float32").eval()) == digest


CODE = """
from transformers import LlamaForCausalLM

class Mine(LlamaForCausalLM):
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        return super().forward(inputs_embeds=SCALE * self.model.embed_tokens(input_ids), **kwargs)
"""


@pytest.fixture
def make(build, tmp_path, monkeypatch):
    """Makes a model of class `Mine` of one module, whose code each program has another version of."""

    def make(code, folder):
        path = tmp_path / folder / "my_model.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("my_model", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "my_model", module)
        spec.loader.exec_module(module)
        return of_class(module.Mine, build)

    return make


def of_class(kind, build):
    model = build(initializer_range=0.2)
    made = kind(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def test_classes_of_one_name_with_other_code_do_not_share(make, wrap):
    spaces = [
        wrap(make(CODE.replace("SCALE", scale), folder)).space.digest
        for scale, folder in (("1", "one"), ("3", "other"), ("1", "again"))
    ]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


def test_two_classes_of_one_name_in_a_file(make, build):
    code = CODE.replace("SCALE", "1") + "\nFirst = Mine\n" + CODE.replace("SCALE", "3")
    second, found = make(code, "both"), []
    for model in (of_class(sys.modules["my_model"].First, build), second):
        try:
            found.append(sources_of(model))
        except UnsupportedModel:
            found.append(f"refused {len(found)}")
    assert found[0] != found[1]


class Held:
    def __init__(self, held):
        self.held = held


def scaled(scale):
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            by = scale if isinstance(scale, float) else scale.held
            return super().forward(inputs_embeds=by * self.model.embed_tokens(input_ids), **kwargs)

    return Scaled


def test_values_of_the_function_around_a_class_count(build, wrap):
    spaces = [wrap(of_class(scaled(scale), build)).space.digest for scale in (1.0, 3.0, 1.0)]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


@pytest.mark.parametrize("kind", ["without a file", "with an object around it"])
def test_classes_that_cannot_be_told_apart_need_a_name(build, wrap, store, kind):
    made = scaled(Held(3.0) if kind == "with an object around it" else 3.0)
    if kind != "with an object around it":
        made.__module__, made.__qualname__ = "nowhere", "Mine"
    model = of_class(made, build)
    with pytest.raises(UnsupportedModel, match="pass model_id"):
        wrap(model)
    assert store.num_opened == 0
    wrap(model, model_id="mine")


def test_a_module_of_a_users_own_in_a_model_of_transformers(build, wrap):
    class Halved(torch.nn.Module):
        def forward(self, x):
            return x / 2

    model = build()
    model.model.layers[0].mlp.act_fn = Halved().eval()
    wrap(model)
    Halved.__module__ = "nowhere"
    with pytest.raises(UnsupportedModel, match="pass model_id"):
        wrap(model)


def with_activations(build, *activations, **options):
    model = build(initializer_range=0.2, **options)
    for at, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = activations[at % len(activations)].eval()
    return model


def by_closure(scale):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return scale * x

    return Scaled()


def by_attribute(scale):
    class Scaled(torch.nn.Module):
        factor = scale

        def forward(self, x):
            return self.factor * x

    return Scaled()


def by_default(scale):
    class Scaled(torch.nn.Module):
        def forward(self, x, factor=scale):
            return factor * x

    return Scaled()


def by_decorator(scale):
    def times(function):
        @functools.wraps(function)
        def scaled(self, x):
            return scale * function(self, x)

        return scaled

    class Scaled(torch.nn.Module):
        @times
        def forward(self, x):
            return x

    return Scaled()


def by_assignment(scale):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x

    Scaled.forward = lambda self, x: scale * x
    return Scaled()


@pytest.mark.parametrize("make", [by_closure, by_attribute, by_default, by_decorator, by_assignment])
def test_whatever_a_class_has_from_the_function_around_it(build, wrap, make):
    spaces = [wrap(with_activations(build, make(scale))).space.digest for scale in (1.0, 3.0, 1.0)]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


def test_each_module_has_the_code_of_its_own_class(build, wrap):
    orders = [[by_closure(scale) for scale in scales] for scales in ((1.0, 3.0, 3.0), (3.0, 1.0, 3.0))]
    assert len({wrap(with_activations(build, *order)).space.digest for order in orders for _ in range(4)}) == 2


def test_a_file_that_was_edited_after_it_was_imported(make, build):
    old = type(make(CODE.replace("SCALE", "1"), "edited"))
    new = type(
        make(CODE.replace("SCALE", "3.25"), "edited")
    )  # Of another length, else Python may take it for the old one.
    assert sources_of(of_class(old, build)) != sources_of(of_class(new, build))


def test_code_in_place_of_a_librarys_own(build, wrap, monkeypatch):
    plain, library = wrap(build()).space.digest, type(build().model.layers[0].mlp)
    forward = library.forward
    monkeypatch.setattr(library, "forward", lambda self, x: 3 * forward(self, x))
    assert wrap(build()).space.digest != plain
    held = Held(3.0)
    monkeypatch.setattr(library, "forward", lambda self, x: held.held * forward(self, x))
    with pytest.raises(UnsupportedModel, match=r"held around .*LlamaMLP\.forward: an object of .*Held.*pass model_id"):
        wrap(build())
    wrap(build(), model_id="mine")
    monkeypatch.undo()
    assert wrap(build()).space.digest == plain


class Mode(enum.Enum):
    ONE, OTHER = 1, 2


class Holding(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return x


KINDS = {
    "numbers of numpy": (np.float64(1), np.float64(3), 3.0),
    "enums": (Mode.ONE, Mode.OTHER),
    "dtypes": (torch.float32, torch.float16),
    "sizes": (torch.Size([1, 2]), torch.Size([1, 3])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_are_no_plain_numbers_of_python(build, tokens, wrap, kind):
    model, spaces = with_activations(build, Holding(KINDS[kind][0])), set()
    for held in KINDS[kind]:
        cached = wrap(with_activations(build, Holding(held)))
        spaces.add(cached.space.digest)
    assert len(spaces) == len(KINDS[kind])
    cached = wrap(model)
    cached.generate(tokens(20), **GREEDY)
    model.model.layers[0].mlp.act_fn.held = KINDS[kind][1]
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(tokens(20), **GREEDY)


def test_tensors_in_a_tuple_need_a_name(build, wrap):
    with pytest.raises(UnsupportedModel, match="pass model_id"):
        wrap(with_activations(build, Holding((torch.ones(1),))))


def test_the_code_of_a_graph_counts(build, wrap):
    made = [torch.fx.symbolic_trace(each) for each in (torch.nn.SiLU(), by_closure(3.0), torch.nn.SiLU())]
    spaces = [wrap(with_activations(build, each)).space.digest for each in made]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_id", [None, "mine"])
def test_torchscript_is_refused(build, wrap, model_id):
    with pytest.raises(UnsupportedModel, match="TorchScript"):
        wrap(with_activations(build, torch.jit.trace(torch.nn.SiLU(), torch.ones(2))), model_id=model_id)


def test_a_config_that_a_module_has_for_itself(build, tokens, wrap):
    models = [build("Mistral") for _ in range(2)]
    for model, window in zip(models, (None, 4), strict=True):
        model.model.config = copy.deepcopy(model.config)
        model.model.config.sliding_window = window
    spaces = [wrap(model) for model in models]
    assert spaces[0].space.digest != spaces[1].space.digest
    models[0].model.config.sliding_window = 4
    with pytest.raises(InvalidRequest, match="config that this namespace"):
        spaces[0].generate(tokens(20), **GREEDY)


@pytest.mark.parametrize("whose", ["a library's class", "a class of one's own"])
def test_methods_that_are_replaced_while_a_model_is_wrapped(build, tokens, wrap, monkeypatch, whose):
    model, prompt = with_activations(build, Holding(1.0)), tokens(20)
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    kind = Holding if whose == "a class of one's own" else type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 3 * forward(self, x))
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(prompt, **GREEDY)
    monkeypatch.undo()
    cached.generate(prompt, **GREEDY)


def test_an_object_that_becomes_a_number(build, tokens, wrap):
    model, prompt = with_activations(build, Holding([1.0])), tokens(20)
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    model.model.layers[0].mlp.act_fn.held = 3.0
    with pytest.raises(InvalidRequest, match="modules that this namespace"):
        cached.generate(prompt, **GREEDY)
