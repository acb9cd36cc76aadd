"""The ingress of `ray.serve.llm`, with errors of OpenAI's form for what its own refuses with another one."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException
from ray.serve.llm.ingress import OpenAiIngress
from starlette.exceptions import HTTPException


class OpenAiErrors(OpenAiIngress):
    """`ingress_cls_config={"ingress_cls": "kvstore.integrations.serve.ingress.OpenAiErrors"}`."""

    async def _process_llm_request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._process_llm_request(*args, **kwargs)
        except HTTPException as error:  # An unknown model: clients of OpenAI's read "error", not "detail".
            kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
            raise OpenAIHTTPException(error.status_code, str(error.detail), kind) from error
