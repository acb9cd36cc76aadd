"""From completions to tokens: as an engine would make them, or none. tests/vllm/test_chat_prompts.py has chats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from router_made import Letters

from kvstore.errors import ConfigError
from kvstore.integrations.serve.prompts import find_request, is_chat, is_long, load_tokenizer, salt_of, tokens_of

LETTERS = Letters()


def tokens(text, *before):
    return [*before, *map(ord, text)]


def test_a_completion_is_its_text_with_the_special_tokens_that_it_asks_for():
    assert tokens_of({"prompt": "ab"}, LETTERS) == tokens("ab", LETTERS.begin)
    assert tokens_of(SimpleNamespace(prompt="ab", add_special_tokens=False), LETTERS) == tokens("ab")


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_a_prompt_of_tokens_is_taken_as_it_is(prompt):
    assert tokens_of({"prompt": prompt}, LETTERS) == [5, 6, 7]


def test_long_requests_are_told_from_others():
    part = {"type": "text", "text": "x" * 100_000}
    messages = [{"role": "user", "content": [part]}, {"role": "user", "content": "x" * 40_000}]
    for request, long, chat in (
        (SimpleNamespace(messages=messages, prompt=None), True, True),
        (SimpleNamespace(messages=messages[1:], prompt=None, tools=[{"name": "x" * 100_000}]), True, True),
        (SimpleNamespace(messages=messages[1:]), False, True),
        ({"prompt": "x" * 200_000}, True, False),
        ({"prompt": [7] * 200_000}, True, False),
        ({"prompt": [[7] * 100_000]}, False, False),
    ):
        assert (is_long(request), is_chat(request)) == (long, chat)


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [True, "x"]},
        {"prompt": "x" * (1 << 22) + "y"},
        {"prompt": "x", "truncate_prompt_tokens": 3},
        {"prompt": "x", "prompt_embeds": "AAAA"},
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
