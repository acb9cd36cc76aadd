"""From a request to the tokens that an engine will compute: text through the tokenizer, chats through vLLM's renderer.

What comes out only steers a request. Where an engine would make other tokens, the request is routed less well, and
answered the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from kvstore.errors import ConfigError

#: Threads that read prompts: so many for most of them, and one for long ones, which take seconds.
NUM_THREADS = 2
#: From here on a prompt is long.
_LONG_CHARS = 1 << 17
#: Embeddings have no tokens.
_UNREADABLE = ("prompt_embeds", "truncate_prompt_tokens")
#: A longer text costs a router more than it can win.
_MOST_CHARS = 1 << 22
#: Types of the parts of a message that have no media: vLLM would fetch those to render them.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


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


def load_renderer(name: str, chat_template: str | None = None) -> Any:
    """Return what makes prompts of chats in vLLM's servers, as it is in those without a GPU; takes seconds.

    Args:
        name: folder or name of the model.
        chat_template: instead of the tokenizer's own.

    Raises:
        ConfigError: vLLM cannot render this model's chats, or is not installed.
    """
    try:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        model = ModelConfig(model=name, renderer_num_workers=NUM_THREADS + 1)
        model.quantization = None  # Or it is checked whether this machine can compute with it.
        return OnlineRenderer(
            model,
            renderer_from_config(VllmConfig(model_config=model)),
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
        )
    except Exception as error:
        raise ConfigError(
            f"request_router_kwargs['tokenizer']: wanted a model whose chats vLLM can render, got {name!r} "
            f"({type(error).__name__}: {error}); name the engines' model folder. Chats go by the length of queues"
        ) from error


def find_request(args: Iterable[Any]) -> Any:
    """Return the first argument of a call that is a completion or a chat, or None."""
    return next((arg for arg in args if _get(arg, "messages") or _get(arg, "prompt")), None)


def is_chat(request: Any) -> bool:
    """Return whether a request is a chat."""
    return bool(_get(request, "messages"))


def is_long(request: Any) -> bool:
    """Return whether reading a request's prompt takes long."""
    return _length(request) > _LONG_CHARS


def salt_of(request: Any) -> str | None:
    """Return a request's `cache_salt`, or None."""
    salt = _get(request, "cache_salt")
    return salt if isinstance(salt, str) and salt else None


def tokens_of(request: Any, reader: Any) -> list[int] | None:
    """Return the tokens of a request's prompt.

    Args:
        request: a completion or chat of OpenAI's API: a completion as an object or a mapping, a chat as vLLM's object.
        reader: what `load_renderer` returned for a chat, a tokenizer of transformers for a completion.

    Returns:
        Token ids in a new list, or None where the prompt is several prompts, too long, has media, or is refused by
        vLLM.

    Raises:
        Exception: the tokenizer or the renderer refuse the request; an engine would do the same.
    """
    if _length(request) > _MOST_CHARS:
        return None
    if is_chat(request):
        return _chat_tokens(request, reader) if all(map(_is_text, request.messages)) else None
    if any(_get(request, name) is not None for name in _UNREADABLE):
        return None
    prompt = _get(request, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        with_special = _get(request, "add_special_tokens")
        return list(reader(prompt, add_special_tokens=with_special is None or bool(with_special))["input_ids"])
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return list(prompt)
    return None


def _chat_tokens(request: Any, renderer: Any) -> list[int] | None:
    changed: dict[str, Any] = {}
    if _get(request, "tool_choice") not in (None, "none"):
        changed["tool_choice"] = "auto"  # For others vLLM wants the engines' parser of calls, which reads no prompt.
    # A copy, as vLLM changes what it renders.
    rendered = asyncio.run(renderer.render_chat(request.model_copy(update=changed, deep=True)))
    if not isinstance(rendered, tuple):  # An error for the client.
        return None
    _, (prompt,) = rendered
    return list(prompt["prompt_token_ids"])


def _is_text(message: Any) -> bool:
    content = _get(message, "content")
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, str) or _get(part, "type") in _TEXT_PARTS for part in content)


def _length(request: Any) -> int:
    """Return about how many characters or tokens a request has."""
    return sum(_num_chars(_get(request, name)) for name in ("prompt", "messages", "tools"))


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], int) else sum(map(_num_chars, value))
    if hasattr(value, "model_dump"):
        value = vars(value)
    return sum(map(_num_chars, value.values())) if isinstance(value, Mapping) else 1


def _get(request: Any, name: str) -> Any:
    return request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
