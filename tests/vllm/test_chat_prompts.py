"""The tokens that a PrefixRouter reads from chats: those of vLLM's own renderer, or none."""

from __future__ import annotations

import json

import pytest

#: A template of the usual kind: arguments of calls as an object, reasoning in tags.
TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for each in messages -%}[{{ each.role }}]{% if each.reasoning %}<think>{{ each.reasoning }}</think>{% endif -%}
{{ each.content if each.content is not none else '' }}{% for call in each.tool_calls or [] -%}
<call>{{ call.function.name }}{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}\
{% endfor %}</call>{% endfor %}[/]{%- endfor -%}{% if mood %}<{{ mood }}>{% endif -%}
{% if add_generation_prompt %}[assistant]{% endif %}"""
#: One that walks through the parts of a message.
PARTS = """{%- for each in messages -%}[{{ each.role }}]{% if each.content is string %}{{ each.content }}{% else -%}
{% for part in each.content %}{{ part.text }}|{% endfor %}{% endif %}[/]{%- endfor -%}"""

SYSTEM = {"role": "system", "content": "Short answers."}
CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls", "dir": "/srv"}'}}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
TEXTS = {"role": "user", "content": [{"type": "text", "text": "Which"}, {"type": "text", "text": "light?"}]}


@pytest.fixture(scope="module")
def read(model):
    """Returns the text that is read of a chat, and None where nothing is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from kvstore.integrations.serve.prompts import load_renderer, tokens_of

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    tokenizer.save_pretrained(model)
    renderers = {template: load_renderer(model, template) for template in (TEMPLATE, PARTS)}

    def read(messages, template=TEMPLATE, **fields):
        request = ChatCompletionRequest(model="m", messages=json.loads(json.dumps(messages)), **fields)
        before = request.model_dump_json()
        tokens = tokens_of(request, renderers[template])
        assert request.model_dump_json() == before, "an engine gets the same request"
        return None if tokens is None else tokenizer.decode(tokens)

    return read


def test_calls_reasoning_and_parts_are_read_as_vllm_renders_them(read):
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    said = {"role": "tool", "tool_call_id": "1", "content": "a.txt"}
    begin = "[system]Short answers.[/]"
    for messages, wanted in (
        ([SYSTEM], ""),
        ([SYSTEM, answer, said], "[assistant]<call>run command=ls dir=/srv</call>[/][tool]a.txt[/]"),
        ([SYSTEM, {**answer, "content": "No.", "tool_calls": []}], "[assistant]No.[/]"),
        ([SYSTEM, {"role": "assistant", "content": "2", "reasoning": "1+1"}], "[assistant]<think>1+1</think>2[/]"),
        ([SYSTEM, TEXTS], "[user]Which\nlight?[/]"),
    ):
        assert read(messages) == begin + wanted + "[assistant]"
    assert read([SYSTEM, TEXTS], PARTS) == "[system]Short answers.|[/][user]Which|light?|[/]"


def test_settings_of_a_chat_count(read):
    wanted = "[system]Short answers.[/]"
    assert read([SYSTEM], add_generation_prompt=False) == wanted
    assert read([SYSTEM], chat_template_kwargs={"mood": "calm"}) == wanted + "<calm>[assistant]"
    tools = '<tools>{"type": "function", "function": {"name": "run", "description": null, "parameters": '
    for choice in ("auto", "required", "none"):
        assert read([SYSTEM], tools=[TOOL], tool_choice=choice).startswith(tools)


def test_what_vllm_refuses_and_media_are_not_read(read):
    image = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/never-fetched.png"}}
    assert read([{"role": "user", "content": [image]}]) is None
    assert read([{"role": "user", "content": [{"image_url": "http://192.0.2.1/x.png"}]}]) is None
    assert read([SYSTEM], chat_template="{{ messages }}") is None
    assert read([{"role": "user", "content": "x" * (1 << 22)}]) is None


def test_a_model_whose_chats_cannot_be_rendered_is_named(tmp_path):
    from kvstore.errors import ConfigError
    from kvstore.integrations.serve.prompts import load_renderer

    with pytest.raises(ConfigError, match=r"tokenizer'.*wanted a model whose chats vLLM can render"):
        load_renderer(str(tmp_path))
