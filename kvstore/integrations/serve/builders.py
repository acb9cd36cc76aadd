"""Builders of `ray.serve.llm` for Serve config files, which have no place for a call of `register()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.integrations.serve.options import check_routers

if TYPE_CHECKING:
    from ray.serve import Application


# Ray Serve wants plain functions of one argument, and would convert a pydantic model of the annotation.
def build_pd_openai_app(args: dict[str, Any]) -> Application:
    """Call `register()`, then return `ray.serve.llm.build_pd_openai_app(args)`: prefill and decode deployments.

    Args:
        args: as Ray's own builder takes them: `prefill_config`, `decode_config` and the options of the ingress.

    Raises:
        ConfigError: the arguments are no mapping, the file of a config is no YAML, or a `PrefixRouter` has options that
            it would refuse. Ray Serve makes routers when the first request comes, and tells nobody when that fails.
            Nothing is registered.
        OSError: the file of a config cannot be read.
        ValueError: Ray refuses the arguments (pydantic's ValidationError). Only the registration is left, which
            changes nothing for other apps.
    """
    from ray.serve import llm

    args = check_routers(args, _read)
    _register()
    return llm.build_pd_openai_app(args)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Call `register()`, then return `ray.serve.llm.build_openai_app(args)`: engines that prefill and decode.

    Args:
        args: as Ray's own builder takes them: `llm_configs` and the options of the ingress.

    Raises:
        ConfigError, OSError, ValueError: as for `build_pd_openai_app`.
    """
    from ray.serve import llm

    args = check_routers(args, _read)
    _register()
    return llm.build_openai_app(args)


def _read(path: str) -> Any:
    import yaml
    from ray.serve import llm

    try:
        return llm.LLMConfig.from_file(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"wanted a config as YAML in {path!r}, got {error}") from error


def _register() -> None:
    from kvstore.integrations.serve.backend import register

    register()
