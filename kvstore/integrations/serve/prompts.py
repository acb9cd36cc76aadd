"""From a request to the tokens that an engine will compute: text through the tokenizer, chats through the template.

What comes out only steers a request. Where an engine would make other tokens, the request is routed less well, and
answered the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.errors import ConfigError

#: Embeddings have no tokens. A template of the client is not run here: engines refuse it as well, by default.
_UNREADABLE = ("prompt_embeds", "truncate_prompt_tokens", "chat_template")
#: A longer text costs a router more than it can win.
_MOST_CHARS = 1 << 22


def load_tokenizer(name: str) -> Any:
    """Return a tokenizer of transformers; takes seconds.

    Raises:
        ConfigError: there is none under this name, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"request_router_kwargs['tokenizer']: wanted a tokenizer that transformers can load, got {name!r} "
            f"({type(error).__name__}: {error}); name the engines' model folder, and install transformers"
        ) from error


def find_request(args: Iterable[Any]) -> Any:
    """Return the first argument of a call that is a completion or a chat, or None."""
    return next((arg for arg in args if _get(arg, "messages") or _get(arg, "prompt")), None)


def salt_of(request: Any) -> str | None:
    """Return a request's `cache_salt`, or None."""
    salt = _get(request, "cache_salt")
    return salt if isinstance(salt, str) and salt else None


def tokens_of(request: Any, tokenizer: Any, chat_template: str | None = None) -> list[int] | None:
    """Return the tokens of a request's prompt.

    Args:
        request: a completion or chat of OpenAI's API, as an object or a mapping.
        tokenizer: of transformers.
        chat_template: instead of the tokenizer's own.

    Returns:
        Token ids in a new list, or None where the prompt is several prompts, too long, has media, or is not text.

    Raises:
        Exception: the tokenizer or the template refuse the request; an engine would do the same.
    """
    if any(_get(request, name) is not None for name in _UNREADABLE):
        return None
    messages = _get(request, "messages")
    if messages:
        return _chat_tokens(request, messages, tokenizer, chat_template)
    prompt = _get(request, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and len(prompt) <= _MOST_CHARS:
        with_special = _get(request, "add_special_tokens")
        return _encode(tokenizer, prompt, True if with_special is None else bool(with_special))
    if isinstance(prompt, list) and len(prompt) <= _MOST_CHARS and all(type(token) is int for token in prompt):
        return list(prompt)
    return None


def _chat_tokens(request: Any, messages: Any, tokenizer: Any, chat_template: str | None) -> list[int] | None:
    conversation = []
    for message in messages:
        content = _text_of(_get(message, "content"))
        if content is None:
            return None
        conversation.append({**_plain(message), "content": content})
    if sum(len(message["content"]) for message in conversation) > _MOST_CHARS:
        return None
    tools = _get(request, "tools")
    generation = _get(request, "add_generation_prompt")
    text = tokenizer.apply_chat_template(
        conversation,
        tools=[_plain(tool) for tool in tools] if tools else None,
        chat_template=chat_template,
        add_generation_prompt=True if generation is None else bool(generation),
        continue_final_message=bool(_get(request, "continue_final_message")),
        tokenize=False,
        **(_get(request, "chat_template_kwargs") or {}),
    )
    return _encode(tokenizer, text, bool(_get(request, "add_special_tokens")))


def _encode(tokenizer: Any, text: str, with_special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=with_special)["input_ids"])


def _text_of(content: Any) -> str | None:
    """Return a message's text; None where it has more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return None
    parts = [part if isinstance(part, str) else _get(part, "text") for part in content]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else None


def _get(request: Any, name: str) -> Any:
    return request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)


def _plain(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else dict(value.model_dump(exclude_none=True))
