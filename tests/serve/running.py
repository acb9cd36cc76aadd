"""A running app, and how tests ask it and break parts of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from serve_app import APP, MODEL_ID
from serve_check import held

openai = pytest.importorskip("openai", reason="no Ray Serve and vLLM here; `make test-serve` has them")

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 240.0
RECOVERY_S = 420.0
PROMPT = "The night train left the coast at eleven, and nobody counted the lamps until the last one was gone. "


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class App:
    """The API of a running app, the store behind it, and the folder of its model."""

    def __init__(self, url, store, folder):
        self.url, self.store, self.folder = url, store, folder

    def client(self):
        return openai.OpenAI(base_url=self.url, api_key="none", timeout=CALL_S, max_retries=0)

    def complete(self, prompt=PROMPT, num_tokens=8, **extra):
        return self.client().completions.create(
            model=MODEL_ID, prompt=prompt, max_tokens=num_tokens, temperature=0,
            extra_body={"ignore_eos": True, **extra},
        )  # fmt: skip

    def text(self, prompt=PROMPT, num_tokens=8, **extra):
        return self.complete(prompt, num_tokens, **extra).choices[0].text

    def text_in_the_end(self, prompt=PROMPT, num_tokens=8):
        """Ask again until there is an answer; returns it."""
        end_s = time.monotonic() + RECOVERY_S
        while True:
            try:
                return self.text(prompt, num_tokens)
            except openai.APIError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(1)  # What a client does whose request failed.

    async def stream_all(self, prompts, num_at_once, num_tokens=8, on_piece=lambda prompt: None):
        """Stream the answers to some prompts; returns a text or an error for each."""
        gate = asyncio.Semaphore(num_at_once)
        client = openai.AsyncOpenAI(base_url=self.url, api_key="none", timeout=CALL_S, max_retries=0)

        async def ask(prompt):
            async with gate:
                try:
                    stream = await client.completions.create(
                        model=MODEL_ID, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True,
                        extra_body={"ignore_eos": True},
                    )  # fmt: skip
                    texts = []
                    async for chunk in stream:
                        texts += [choice.text for choice in chunk.choices]
                        on_piece(prompt)
                    return "".join(texts)
                except openai.APIError as error:
                    return error

        async with client:
            return await asyncio.gather(*(ask(prompt) for prompt in prompts))

    def leave(self, prompt, num_times):
        """Begin to read some long answers, one after the other, and go away after the first piece of each."""

        async def leave():
            client = openai.AsyncOpenAI(base_url=self.url, api_key="none", timeout=CALL_S, max_retries=0)
            async with client:
                for number in range(num_times):
                    stream = await client.completions.create(
                        model=MODEL_ID, prompt=f"{number}: {prompt}", max_tokens=1_500, stream=True,
                        extra_body={"ignore_eos": True},
                    )  # fmt: skip
                    await anext(aiter(stream))
                    await stream.close()

        asyncio.run(leave())

    def held(self):
        return held(self.store)


def pids_of(kind):
    """Process ids of the living replicas of a deployment: "Prefill" or "Decode"."""
    from ray._private import state

    return [
        actor["Pid"]
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith(f"SERVE_REPLICA::{APP}#{kind}")
    ]


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def wait_until(holds, what, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"not in time: {what}"
        time.sleep(0.1)
