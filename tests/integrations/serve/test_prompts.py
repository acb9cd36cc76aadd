"""From requests to tokens: as an engine would make them, or none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from router_made import Letters

from kvstore.errors import ConfigError
from kvstore.integrations.serve.prompts import find_request, load_tokenizer, salt_of, tokens_of

LETTERS = Letters()


def tokens(text, *before):
    return [*before, *map(ord, text)]


def test_a_completion_is_its_text_with_the_special_tokens_that_it_asks_for():
    assert tokens_of({"prompt": "ab"}, LETTERS) == tokens("ab", LETTERS.begin)
    assert tokens_of(SimpleNamespace(prompt="ab", add_special_tokens=False), LETTERS) == tokens("ab")


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_a_prompt_of_tokens_is_taken_as_it_is(prompt):
    assert tokens_of({"prompt": prompt}, LETTERS) == [5, 6, 7]


def test_a_chat_goes_through_the_template():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    assert tokens_of({"messages": messages}, LETTERS) == tokens("<system>s<user>u<assistant>")
    assert tokens_of({"messages": messages, "add_generation_prompt": False}, LETTERS, "T") == tokens(
        "T<system>s<user>u"
    )


def test_text_in_parts_is_joined_and_media_are_not_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert tokens_of({"messages": [{"role": "user", "content": parts}]}, LETTERS) == tokens("<user>a\nb<assistant>")
    with_image = [*parts, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert tokens_of({"messages": [{"role": "user", "content": with_image}]}, LETTERS) is None


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [True, "x"]},
        {"prompt": "x" * (1 << 22) + "y"},
        {"prompt": "x", "truncate_prompt_tokens": 3},
        {"prompt": "x", "prompt_embeds": "AAAA"},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{% for a in b %}"},
        {"messages": [{"role": "user", "content": 5}]},
        {"input": "x"},
    ],
    ids=lambda request: next(iter(request)) + str(len(request)),
)
def test_what_is_not_one_prompt_of_text_is_not_read(request_):
    assert tokens_of(request_, LETTERS) is None


def test_the_request_is_found_among_the_arguments_of_a_call():
    completion = SimpleNamespace(prompt="x", messages=None, cache_salt="s")

    assert find_request([None, SimpleNamespace(headers={}), completion]) is completion
    assert find_request([3, "x", {}]) is None
    assert salt_of(completion) == "s"
    assert salt_of({"cache_salt": ""}) is None


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer'.*wanted a tokenizer"):
        load_tokenizer(str(tmp_path))
