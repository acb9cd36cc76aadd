"""What examples/serve_openai.py asks its app, and what it shows of the answers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from serve_app import BLOCK_SIZE, HANDOFF_TTL_S, MODEL_ID

CALL_S = 120.0
SETTLE_S = HANDOFF_TTL_S + 20.0
STORY = "The night train left the coast at eleven, and the two sisters counted the lamps until the last was gone. " * 4
SYSTEM = "You are the guide of a small observatory. Answer in one line, and name what can be seen with bare eyes. " * 3
QUESTION = "Which bright light is that over the chapel tonight?"


def held(store: Any) -> dict[str, int]:
    """Return what the nodes of a store hold for others now, and what hand-offs took from them, in blocks."""
    nodes = [node for node in store.stats()["nodes"].values() if "error" not in node]
    blocks = [node["traffic"]["out_bytes"]["handoff"] // (node["slot_bytes"] or 1) for node in nodes]
    return {
        "num_pinned": sum(node["pool"]["num_pinned"] for node in nodes if node["pool"]),
        "num_handoffs": sum(node["num_handoffs"] for node in nodes),
        "num_by_ticket": sum(blocks),
    }


def settled(store: Any, timeout_s: float = SETTLE_S) -> dict[str, int]:
    """Return the same once nothing is pinned and no hand-off is open, or when the time is over."""
    end_s = time.monotonic() + timeout_s
    while (now := held(store))["num_pinned"] or now["num_handoffs"]:
        if time.monotonic() >= end_s:
            break
        time.sleep(0.1)
    return now


class Asker:
    """Asks an app one question after the other, and notes what came of each."""

    def __init__(self, url: str, store: Any) -> None:
        import openai

        self._errors = openai.APIStatusError
        self._client = openai.OpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0)
        self._store = store
        self.rows: list[dict[str, Any]] = []

    def ask(self, title: str, *, stream: bool = False, num_tokens: int = 16, **prompt: Any) -> str:
        """Ask a completion (`prompt=`) or a chat (`messages=`), greedily; returns the text of the answer."""
        before = held(self._store)["num_by_ticket"]
        chat = "messages" in prompt
        endpoint = self._client.chat.completions if chat else self._client.completions
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        began_s = time.perf_counter()
        answer = endpoint.create(
            model=MODEL_ID, max_tokens=num_tokens, temperature=0, extra_body={"ignore_eos": True}, **options, **prompt
        )
        first_s, text, usage = None, "", None
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                first_s = first_s or time.perf_counter() - began_s
                said = (choice.delta if stream else choice.message) if chat else choice
                text += (said.content if chat else said.text) or ""
            usage = chunk.usage or usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        self.rows.append(
            {
                "request": title,
                "kind": "chat" if chat else "completion",
                "stream": stream,
                "num_tokens": usage.prompt_tokens,
                "num_cached": cached or 0,
                "num_by_ticket": held(self._store)["num_by_ticket"] - before,
                "first_token_s": first_s,
                "text": text,
            }
        )
        return text

    def refuse(self, title: str, **request: Any) -> int:
        """Ask something that no app can answer; returns the status."""
        status = 200
        try:
            self._client.completions.create(model=MODEL_ID, **request)
        except self._errors as error:
            status = error.status_code
        self.rows.append({"request": title, "kind": "completion", "status": status})
        return status

    def leave(self, title: str, prompt: str) -> None:
        """Begin to read a long answer, and go away."""
        stream = self._client.completions.create(
            model=MODEL_ID, prompt=prompt, max_tokens=1_000, stream=True, extra_body={"ignore_eos": True}
        )
        with contextlib.closing(stream):
            next(iter(stream))
        self.rows.append({"request": title, "kind": "completion", **settled(self._store)})


def chat(*contents: str) -> list[dict[str, str]]:
    """Return a conversation: a system prompt, then user and assistant in turn."""
    roles = ["system", *("user", "assistant") * len(contents)]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def check(url: str, store: Any, one_deployment: bool) -> dict[str, Any]:
    """Ask the app, and return {"rows", "summary"}."""
    app = Asker(url, store)
    plain = app.ask("a story", prompt=STORY)
    again = app.ask("the same, streamed", prompt=STORY, stream=True)
    first = app.ask("a chat, turn 1", messages=chat(SYSTEM, QUESTION))
    streamed = app.ask("the same, streamed", messages=chat(SYSTEM, QUESTION), stream=True)
    app.ask("turn 2", messages=chat(SYSTEM, QUESTION, first, "And will it be there at eleven?"), stream=True)
    app.ask("same guide, other question", messages=chat(SYSTEM, "Is there a step at the telescope?"))
    app.ask("shorter than a block", prompt="Hello there!")
    status = app.refuse("a temperature of 'warm'", prompt=STORY, extra_body={"temperature": "warm"})
    app.leave("a reader goes away", "Count the stars. " * 8)
    after = app.ask("the story once more", prompt=STORY)
    asked = [row for row in app.rows if "num_tokens" in row]
    left = next(row for row in app.rows if "num_pinned" in row)
    summary = {
        "num_same": sum((plain == again, first == streamed, plain == after)),
        "num_cached": sum(row["num_cached"] for row in asked),
        "num_by_ticket": sum(row["num_by_ticket"] for row in asked),
        "status_of_refused": status,
        "num_pinned_after_leaving": left["num_pinned"] + left["num_handoffs"],
    }
    found = all(row["num_cached"] >= BLOCK_SIZE for row in asked if row["request"] in ("turn 2", "the same, streamed"))
    summary["ok"] = (
        summary["num_same"] == 3
        and found
        and 400 <= status < 500
        and not summary["num_pinned_after_leaving"]
        and (one_deployment or summary["num_by_ticket"] > 0)
    )
    return {"one_deployment": one_deployment, "rows": app.rows, "summary": summary}


def show(result: dict[str, Any]) -> None:
    """Print the result for a human."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("request", "kind"):
        table.add_column(title, no_wrap=True)
    for title in ("streamed", "tokens", "cached", "by ticket", "first token"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result["rows"]:
        if "num_tokens" in row:
            streamed = "yes" if row["stream"] else "no"
            blocks = f"{row['num_by_ticket']} blocks" if row["num_by_ticket"] else "-"
            cells = (streamed, str(row["num_tokens"]), str(row["num_cached"]), blocks, f"{row['first_token_s']:.2f} s")
        elif "status" in row:
            cells = (f"refused, {row['status']}", "", "", "", "")
        else:
            cells = (f"{row['num_pinned'] + row['num_handoffs']} pins left", "", "", "", "")
        table.add_row(row["request"], row["kind"], *cells)
    Console(width=110, highlight=False).print(table)
    summary = result["summary"]
    print(
        "cached: tokens of the prompt whose KV the answering engine did not compute. by ticket: blocks of "
        f"{BLOCK_SIZE} tokens that the\nprefill engine handed over to it. {summary['num_same']} of 3 answers that were "
        "asked twice are the same."
    )
