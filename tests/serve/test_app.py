"""The app: what clients see of it, and that KV goes from prefill to decode by ticket."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from running import PROMPT, wait_until
from serve_app import APP, BLOCK_SIZE, MODEL_ID
from serve_check import chat, check, settled

from kvstore.integrations.serve.prompts import load_renderer, load_tokenizer, tokens_of


def test_the_check_of_the_example_passes(app):
    result = check(app.url, app.store, one_deployment=False)

    assert result["summary"]["ok"], json.dumps(result, indent=1)


def test_a_prompt_that_no_engine_knows_goes_to_decode_by_ticket(app):
    prompt = "By ticket: " + PROMPT * 3
    before = app.held()["num_by_ticket"]
    answer = app.complete(prompt)

    assert app.held()["num_by_ticket"] - before == answer.usage.prompt_tokens // BLOCK_SIZE
    assert app.text(prompt) == answer.choices[0].text


def test_a_router_reads_the_tokens_that_engines_compute(app):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer, renderer = load_tokenizer(app.folder), load_renderer(app.folder)
    for prompt in (PROMPT, "a\nb  <|end|> x", [7, 8, 9]):
        (choice,) = app.complete(prompt, 1, return_token_ids=True).choices
        assert choice.model_extra["prompt_token_ids"] == tokens_of({"prompt": prompt}, tokenizer)

    parts = [{"type": "text", "text": "Which"}, {"type": "text", "text": "light?"}]
    for messages in (chat("Be short.", "Hello!"), chat("s", "a", "b", "c"), [{"role": "user", "content": parts}]):
        answer = app.client().chat.completions.create(
            model=MODEL_ID, messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
        )
        request = ChatCompletionRequest(model=MODEL_ID, messages=messages)
        assert answer.model_extra["prompt_token_ids"] == tokens_of(request, renderer)


def test_engines_say_how_much_their_caches_hold(app):
    from ray import serve

    engines = [name for name in serve.status().applications[APP].deployments if name.startswith(("Prefill", "Decode"))]
    assert len(engines) == 2
    for name in engines:
        said = serve.get_deployment_handle(name, APP).collective_rpc.remote("raykv_cache_tokens")
        # 128 MiB, as the app says, at 4 KiB a token.
        assert said.result(timeout_s=60) == [(128 << 20) // (4 << 10)], name


def test_200_streams_at_concurrency_16_are_all_answered(app):
    prompts = [f"{number % 40}: {PROMPT}" for number in range(200)]
    answers = asyncio.run(app.stream_all(prompts, num_at_once=16))

    assert [answer for answer in answers if not isinstance(answer, str) or not answer] == []
    # Equal prompts have equal answers, whatever was found for each of them.
    assert len(set(zip(prompts, answers, strict=True))) == len(set(prompts))
    assert settled(app.store)["num_pinned"] == 0


def test_a_client_that_goes_away_leaves_no_pin(app):
    app.leave(PROMPT * 2, num_times=8)
    # An answer of 1,500 tokens would take longer than this.
    wait_until(lambda: not app.held()["num_pinned"] + app.held()["num_handoffs"], "no pin and no hand-off is left")
    assert app.text()


def post(url, body, content_type="application/json"):
    request = urllib.request.Request(url, data=body, headers={"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b"{"),
        ("completions", b"[]"),
        ("completions", b'{"model": "tiny-llama", "prompt": "x", "temperature": "warm"}'),
        ("completions", b'{"model": "tiny-llama", "prompt": "x", "max_tokens": -5}'),
        ("completions", b'{"model": "tiny-llama", "prompt": "x", "max_tokens": NaN}'),
        ("completions", b'{"model": "another", "prompt": "x"}'),
        ("completions", json.dumps({"model": MODEL_ID, "prompt": "x" * 5_000, "max_tokens": 1}).encode()),
        ("chat/completions", b'{"model": "tiny-llama", "messages": "hello"}'),
        ("chat/completions", b'{"model": "tiny-llama", "messages": [{"role": "user"}], "tools": 5}'),
    ],
)
def test_a_malformed_request_is_a_4xx_that_says_why_and_disturbs_no_other(app, path, body):
    wanted = app.text()
    status, answer = post(f"{app.url}/{path}", body)

    assert 400 <= status < 500, answer
    assert answer["error"]["message"]
    assert app.text() == wanted


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_of_another_content_type_is_a_400_that_names_the_header(app, content_type):
    status, answer = post(f"{app.url}/completions", b'{"model": "tiny-llama", "prompt": "x"}', content_type)

    assert status == 400, answer
    assert f"application/json, got Content-Type: {content_type}" in answer["error"]["message"]


def test_what_a_client_says_of_its_blocks_reaches_the_store_and_its_tickets_do_not(app):
    def num_low():
        return sum(node["pool"]["num_low"] for node in app.store.stats()["nodes"].values())

    prompt, before = "Low: " + PROMPT * 2, num_low()
    plain = app.text("Plain: " + PROMPT)
    assert app.text(prompt, kv_transfer_params={"raykv_priority": "low"})
    wait_until(lambda: num_low() > before, "blocks are low")
    for params in ({"do_remote_prefill": True, "raykv_ticket": "stolen"}, {"do_remote_decode": False}, {}):
        assert app.text("Plain: " + PROMPT, kv_transfer_params=params) == plain
