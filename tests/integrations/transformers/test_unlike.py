"""Two models that compute other KV never share, whatever makes the difference; like ones do, in any process."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama import modeling_llama

from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers import identity
from kvstore.integrations.transformers.identity import kv_shape, namespace_of

GREEDY = {"max_new_tokens": 4, "do_sample": False}

CODE = """
import torch

def act(x):
    return BY * x

class Mine(torch.nn.Module):
    def forward(self, x):
        return act(x)
"""


def space(model, model_id=None):
    return namespace_of(model, kv_shape(model, 16)[0], model_id, b"").digest


@pytest.fixture
def of_file(tmp_path, monkeypatch):
    """Imports a module `mine` of a program; another program has another module of this name."""

    def load(code, folder):
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("mine", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", module)
        spec.loader.exec_module(module)
        return module

    return load


def with_act(model, act):
    for layer in model.model.layers:
        layer.mlp.act_fn = act.eval()
    return model


class Holding(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x


def twice(self, x):
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def no_rope(q, k, *_, **__):
    return q, k


def louder(_, __, output):
    return 2 * output if isinstance(output, torch.Tensor) else None


class Half(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


class Adapted(torch.nn.Module):
    """As adapters of low rank are: the plain layer, two small ones, and which of them are on."""

    def __init__(self, inner, is_on):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.inner, self.active = inner, ["default"] if is_on else []
        self.a = torch.nn.Parameter(torch.randn(2, inner.in_features, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(inner.out_features, 2, generator=generator))

    def forward(self, x):
        return self.inner(x) + (x @ self.a.T @ self.b.T if self.active else 0)


def train(model):
    """One step of an optimiser, in place."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    optimizer.step()
    model.eval()


def one_element(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1


def trained(model):
    train(model)


def another_weight_is_shared(model):
    model.model.layers[2].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def another_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def another_activation(model):
    with_act(model, torch.nn.ReLU())


def another_scale(model):
    model.model.layers[1].self_attn.scaling = 0.5


def another_norm(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def another_class(model):
    model.model.norm.__class__ = type("LlamaRMSNorm", (type(model.model.norm),), {"__module__": __name__})


def a_method_of_one_object(model):
    model.model.layers[0].mlp.forward = functools.partial(twice, model.model.layers[0].mlp)


def a_hook(model):
    model.model.layers[0].mlp.register_forward_hook(louder)


def a_hook_that_holds_something(model):
    by = torch.full((64,), 2.0)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * by)


def a_parametrization(model):
    parametrize.register_parametrization(model.model.layers[0].self_attn.k_proj, "weight", Half())
    model.eval()


def an_adapter(model):
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj, is_on=True).eval()


def an_adapter_that_is_off(model):
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj, is_on=False).eval()


def another_attention(model):
    def halved(module, query, key, value, mask, **more):
        return sdpa_attention_forward(module, query, key, value / 2, mask, **more)

    AttentionInterface.register("half", halved)
    AttentionMaskInterface.register("half", sdpa_mask)
    model.set_attn_implementation("half")


def eager_attention(model):
    model.set_attn_implementation("eager")


def a_config_of_a_modules_own(model):
    model.model.config = copy.deepcopy(model.config)
    model.model.config.sliding_window = 8


EDITS = [
    one_element, trained, another_weight_is_shared, another_buffer, another_activation, another_scale, another_norm,
    another_class, a_method_of_one_object, a_hook, a_hook_that_holds_something, a_parametrization, an_adapter,
    an_adapter_that_is_off, another_attention, eager_attention, a_config_of_a_modules_own,
]  # fmt: skip


REFUSED = {
    a_hook_that_holds_something: "pass model_id",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_that_was_edited_is_another_one(build, tokens, wrap, edit):
    model, prompt = build(initializer_range=0.2), tokens(40)
    cached, other = wrap(model), build(initializer_range=0.2)
    cached.generate(prompt, **GREEDY)
    edit(other)
    edit(model)
    with pytest.raises((InvalidRequest, UnsupportedModel), match=r"changed or moved|model_id"):
        cached.generate(prompt, **GREEDY)
    assert cached.stats.num_saved_blocks == 2
    if edit in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[edit]):
            wrap(other)
        return
    renewed = wrap(other)
    answer = renewed.generate(prompt, **GREEDY)
    assert renewed.stats.num_loaded_tokens == 0
    assert torch.equal(answer, other.generate(prompt, **GREEDY))


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit not in (one_element, trained, another_buffer)])
def test_a_name_stands_for_weights_and_not_for_how_they_are_used(build, edit):
    other = build()
    edit(other)
    is_of_weights = edit is another_weight_is_shared
    assert (space(other, "mine") == space(build(), "mine")) == is_of_weights


def test_a_wrapped_model_that_is_trained_in_place_misses(build, tokens, wrap):
    model, prompt = build(), tokens(40)
    wrap(model).generate(prompt, **GREEDY)
    train(model)
    renewed = wrap(model)
    assert torch.equal(renewed.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))
    assert renewed.stats.num_loaded_tokens == 0


def patched_method(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", twice)


def patched_function(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", no_rope)


def another_transformers(monkeypatch):
    monkeypatch.setattr(identity.transformers, "__version__", "5.99.0")


def another_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "3.0.0")


def a_hook_of_all_modules(monkeypatch):
    handle = torch.nn.modules.module.register_module_forward_hook(louder)
    monkeypatch.setattr(modeling_llama, "handle", handle, raising=False)  # Only to keep it.


@pytest.mark.parametrize("model_id", [None, "mine"])
@pytest.mark.parametrize(
    "change",
    [patched_method, patched_function, another_transformers, another_torch, a_hook_of_all_modules],
)
def test_what_is_changed_for_all_models_counts(build, monkeypatch, change, model_id):
    before = space(build(), model_id)
    change(monkeypatch)
    try:
        assert space(build(), model_id) != before
    finally:
        if change is a_hook_of_all_modules:
            modeling_llama.handle.remove()
        monkeypatch.undo()
    assert space(build(), model_id) == before


@pytest.mark.parametrize("backend", [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, None])
def test_coarse_products_count_in_both_ways_of_torch_to_choose_them(build, backend):
    model = build()
    before, snapshot = space(model), identity.Snapshot(model, is_named=False)
    try:
        if backend:
            backend.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("medium")
        assert space(model) != before
        with pytest.raises(InvalidRequest, match="products"):
            snapshot.check(model)
    finally:
        if backend:
            backend.fp32_precision = "none"
        else:
            torch.set_float32_matmul_precision("highest")
    assert space(model) == before


def quieter(_, given, output=None):
    return given[0] / 2 if output is None else output.clamp(-0.5, 0.5)


def hooked(model, *hooks, is_pre=False):
    mlp = model.model.layers[0].mlp
    for hook in hooks:
        (mlp.register_forward_pre_hook if is_pre else mlp.register_forward_hook)(hook)
    return model


def test_hooks_count_by_order_number_and_kind(build):
    models = [
        hooked(build(), louder, quieter),
        hooked(build(), quieter, louder),
        hooked(build(), quieter),
        hooked(build(), quieter, quieter),
        hooked(build(), quieter, is_pre=True),
    ]
    assert len({space(model) for model in models}) == len(models)
    assert space(hooked(build(), louder, quieter)) == space(models[0])


def test_a_hook_once_more_or_in_another_place_is_noticed(build):
    model = hooked(build(), louder, quieter)
    snapshot = identity.Snapshot(model, is_named=False)
    hooks = model.model.layers[0].mlp._forward_hooks
    hooks.move_to_end(next(iter(hooks)))
    with pytest.raises(InvalidRequest, match="changed or moved"):
        snapshot.check(model)
    snapshot = identity.Snapshot(model, is_named=False)
    hooked(model, louder)
    with pytest.raises(InvalidRequest, match="changed or moved"):
        snapshot.check(model)


class Scaled(torch.nn.Module):
    by = 1.0

    def forward(self, x, more=0.0, *, less=0.0):
        return self.by * x + more - less


def scaled_by(x, by=1.0):
    return by * x


@pytest.mark.parametrize("model_id", [None, "mine"])
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Scaled, "by", 2.0),
        (Scaled.forward, "__defaults__", (1.0,)),
        (Scaled.forward, "__kwdefaults__", {"less": 1.0}),
        (scaled_by, "__defaults__", (2.0,)),
    ],
)
def test_attributes_of_classes_and_defaults_count(build, monkeypatch, owner, name, value, model_id):
    model = build()
    model.model.layers[0].mlp.act_fn = Scaled().eval()
    model.model.layers[1].mlp.act_fn = Holding(scaled_by).eval()
    before, snapshot = space(model, model_id), identity.Snapshot(model, is_named=bool(model_id))
    monkeypatch.setattr(owner, name, value)
    assert space(model, model_id) != before
    with pytest.raises(InvalidRequest, match="changed or moved"):
        snapshot.check(model)


@pytest.mark.parametrize("model_id", [None, "mine"])
def test_classes_of_one_name_of_files_with_other_bytes(build, of_file, model_id):
    spaces = [
        space(with_act(build(), of_file(CODE.replace("BY", by), folder).Mine()), model_id)
        for by, folder in (("1", "one"), ("3", "other"), ("1", "again"))
    ]
    assert spaces[0] == spaces[2]
    assert spaces[0] != spaces[1]


def test_a_function_that_another_file_has(build, of_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    spaces = []
    for by in ("1", "3"):
        (tmp_path / "helper_of_mine.py").write_text(f"def act(x):\n    return {by} * x\n")
        code = "import torch\nfrom helper_of_mine import act\n" + CODE[CODE.index("class") :]
        spaces.append(space(with_act(build(), of_file(code, "helped").Mine())))
    assert spaces[0] != spaces[1]


def test_a_class_without_a_file_needs_a_name(build, wrap, store):
    scope = {"__name__": "nowhere"}
    exec(CODE.replace("BY", "1"), scope)
    model = with_act(build(), scope["Mine"]())
    with pytest.raises(UnsupportedModel, match=r"nowhere\.Mine.*pass model_id"):
        wrap(model)
    assert store.num_opened == 0
    wrap(model, model_id="mine")


class Object:
    pass


class Notes(dict):
    pass


class Named(str):
    pass


UNCLEAR = {
    "an object": Object,
    "a function within another": lambda: lambda x: x,
    "a tensor": lambda: torch.ones(2),
    "a tensor deep inside": lambda: {"a": [(torch.ones(2),)]},
    "a module that is not of the model": lambda: [torch.nn.Linear(2, 2)],
    "a dict that may hold more": lambda: Notes(a=1),
    "a text that may hold more": lambda: Named("a"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_settings_that_could_hold_anything_are_refused_by_name(build, wrap, store, kind):
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.act_fn\.by: .*pass model_id"):
        wrap(with_act(build(), Holding(UNCLEAR[kind]())))
    assert store.num_opened == 0


PLAIN = [
    1.0,
    1,
    True,
    "1",
    None,
    (1.0,),
    [1.0],
    {"a": 1.0, "b": 2.0},
    {"b": 2.0, "a": 1.0},
    {1: 0},
    {"1": 0},
    {1: 0, "a": 0},
    {2.0},
    torch.float32,
    functools.partial(torch.mul, 1.0),
    twice,
    Half,
]


def test_plain_settings_count_by_content(build):
    spaces = [space(with_act(build(), Holding(copy.deepcopy(by)))) for by in PLAIN]
    assert len(set(spaces)) == len(PLAIN)
    assert [space(with_act(build(), Holding(copy.deepcopy(by)))) for by in PLAIN] == spaces


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make", [lambda: torch.jit.trace(torch.nn.SiLU(), torch.ones(2)), lambda: torch.fx.symbolic_trace(torch.nn.SiLU())]
)
def test_modules_without_code_of_python_need_a_name(build, wrap, make):
    with pytest.raises(UnsupportedModel, match="pass model_id"):
        wrap(with_act(build(), make()))


def test_a_config_that_json_cannot_hold_is_refused(build, wrap):
    model = build()
    model.config.thing = torch.ones(2)
    with pytest.raises(UnsupportedModel, match=r"config 0.*Tensor"):
        wrap(model)


STOCK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("models", sys.argv[1])
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
import torch, transformers
from kvstore.integrations.transformers import identity
from kvstore.integrations.transformers.identity import kv_shape, namespace_of

def show(name, model):
    print(name, namespace_of(model, kv_shape(model, 16)[0], None, b"").digest.hex())

for family in models.FAMILIES:
    show(family, models.build(family))
"""


@pytest.mark.timeout(600)
def test_stock_models_share_over_processes(tmp_path):
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
    assert len(set(answers[0])) == 2 * 9
