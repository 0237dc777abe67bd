"""Errors as clients see them, in the shape of their API: what was given, what is allowed, what to do next."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from surefoot.errors import EngineError, SurefootError

log = logging.getLogger("surefoot.serving")

ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for the user of the API.
        param: the field of the request that is to blame.
        code: a word for programs.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after
        self.type = type or ("server_error" if status >= 500 else "invalid_request_error")

    def body(self, anthropic: bool, request_id: str) -> dict[str, Any]:
        """In the shape of the client's API."""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def is_anthropic(path: str) -> bool:
    return path.startswith(ANTHROPIC_PATHS)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def of_engine(problem: Exception) -> ApiError:
    """What the engine refuses is the request's fault and names its field first; a failed step is the server's."""
    if isinstance(problem, SurefootError):
        message = str(problem)
        if "this engine serves at most" in message:
            return invalid(message, "messages" if "messages" in message else "prompt", "context_length_exceeded")
        name = re.match(r"(?:the )?([a-z_]+)", message)
        return invalid(message, name[1] if name else None)
    if isinstance(problem, EngineError) and "shutting down" in str(problem):
        return ApiError(503, "the server is shutting down: try another one", code="shutting_down", retry_after=10)
    return ApiError(500, str(problem) or type(problem).__name__, code="engine_error")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that pydantic found, with the field's path."""
    first = errors[0]
    given = [part for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    # After the field's name, positions in lists; names there are those of a union's members.
    place = [str(part) for index, part in enumerate(given) if index == 0 or isinstance(part, int)]
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "not JSON")
        return invalid(f"the body is not valid JSON: {reason}", code="invalid_json")
    name = ".".join(place) or "the body"
    return invalid(f"{name}: {first.get('msg', 'invalid')}", ".".join(place) or None)


def response_of(http: Request, error: ApiError) -> JSONResponse:
    """The error as a response in the shape of the path's API."""
    body = error.body(is_anthropic(http.url.path), request_id_of(http))
    return JSONResponse(body, error.status, headers=error.headers)


def request_id_of(http: Request) -> str:
    """The id that the middleware gave the request."""
    return str(http.scope.get("surefoot.request_id", ""))


class Problem(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An error in the form of the OpenAI API."""

    error: Problem


class AnthropicProblem(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error in the form of the Anthropic API."""

    type: str
    error: AnthropicProblem
    request_id: str


STATUSES = {
    400: "The request cannot be served; the message names the field.",
    401: "No valid API key.",
    404: "There is no such model or path.",
    408: "The body has not arrived in time.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "A step of the engine has failed.",
    503: "The server is starting, leaving, or has lost its engine.",
}


def documented(*statuses: int, anthropic: bool = False) -> dict[int | str, dict[str, Any]]:
    """Errors of an endpoint for the OpenAPI schema."""
    model = AnthropicErrorBody if anthropic else ErrorBody
    return {status: {"model": model, "description": STATUSES[status]} for status in statuses or STATUSES}


def without_422(app: FastAPI) -> None:
    """The schema without the framework's own form of a validation error, which this server never sends."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        for path in schema["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def install(app: FastAPI) -> None:
    """Make every way to fail answer in the shape of the client's API."""

    @app.exception_handler(ApiError)
    async def _api_error(http: Request, error: ApiError) -> JSONResponse:
        return response_of(http, error)

    @app.exception_handler(SurefootError)
    async def _refused(http: Request, error: SurefootError) -> JSONResponse:
        return response_of(http, of_engine(error))

    @app.exception_handler(RequestValidationError)
    async def _malformed(http: Request, error: RequestValidationError) -> JSONResponse:
        return response_of(http, of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(http: Request, error: HTTPException) -> JSONResponse:
        message = f"{http.method} {http.url.path}: {error.detail or HTTPStatus(error.status_code).phrase}"
        if error.status_code == 400:  # of the framework: the body could not be parsed
            message = "the body is not valid JSON in UTF-8"
        code = "not_found" if error.status_code == 404 else None
        found = response_of(http, ApiError(error.status_code, message, code=code))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(Exception)
    async def _bug(http: Request, error: Exception) -> JSONResponse:
        log.exception("request %s failed", request_id_of(http), exc_info=error)
        if isinstance(error, EngineError):
            return response_of(http, of_engine(error))
        return response_of(http, ApiError(500, "the server has failed on this request; its log says why"))
