"""The ingress of `ray.serve.llm`, with errors of OpenAI's form where its own has another form, or none."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException
from ray.llm._internal.serve.core.ingress.middleware import _handle_validation_error
from ray.serve.llm.ingress import OpenAiIngress
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse

from kvstore.integrations.serve.streams import whole_or_error


class OpenAiErrors(OpenAiIngress):
    """`ingress_cls_config={"ingress_cls": "kvstore.integrations.serve.ingress.OpenAiErrors"}`."""

    async def _process_llm_request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await super()._process_llm_request(*args, **kwargs)
        except HTTPException as error:  # An unknown model: clients of OpenAI's read "error", not "detail".
            kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
            raise OpenAIHTTPException(error.status_code, str(error.detail), kind) from error
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = whole_or_error(answer.body_iterator)
        return answer

    def __serve_build_asgi_app__(self) -> Any:
        """Return the app that answers requests; Ray Serve asks for it when a replica begins."""
        app: Any = self.app
        app.add_exception_handler(RequestValidationError, refuse_body)
        return app


async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
    """Answer 400 to a body that does not validate, as Ray does, also where Ray's answer cannot be written."""
    try:
        return await _handle_validation_error(request, error)
    except (TypeError, ValueError):  # It repeats the input, and bytes or NaN are not JSON.
        got = request.headers.get("content-type", "none")
        message = "; ".join(str(each.get("msg", "")) for each in error.errors())
        if "json" not in got.lower():
            message = f"wanted a JSON body with the header Content-Type: application/json, got Content-Type: {got}"
        found = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse(status_code=400, content={"error": found})
