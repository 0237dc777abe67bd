"""Models, tokens, and whether the server is alive."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from surefoot.errors import ConfigurationError
from surefoot.serving.dialect import from_client
from surefoot.serving.errors import invalid
from surefoot.serving.responding import state_of, texts_of
from surefoot.version import __version__

router = APIRouter()


class TokenizeRequest(BaseModel):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(default=None, description="The text of every token, too.")


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


@router.get("/v1/models", tags=["OpenAI"])
async def models(http: Request) -> dict[str, Any]:
    """The one model that is served."""
    state = state_of(http)
    return {"object": "list", "data": [_model(http, name) for name in state.model_names[:1]]}


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, http: Request) -> dict[str, Any]:
    """The model, by name."""
    state_of(http).check_model(name)
    return _model(http, name)


def _model(http: Request, name: str) -> dict[str, Any]:
    state = state_of(http)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "surefoot",
        "max_model_len": state.llm.llm.engine.max_model_len,
        "root": state.llm.llm.target.name,
    }


@router.post("/tokenize", tags=["tokens"])
def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
    """Token ids of a text or a conversation, as the other endpoints read them."""
    state = state_of(http)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give one of prompt and messages", "prompt")
    llm = state.llm.llm
    if body.prompt is not None:
        tokens = llm.prompt_tokens(body.prompt)
    else:
        tokens = llm.chat_tokens(body.messages or [], from_client(body.chat_template_kwargs or {}))
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": llm.engine.max_model_len}
    if body.return_token_strs:
        texts = texts_of(state)
        found["token_strs"] = [texts.of(token)[0] for token in tokens]
    return found


@router.post("/detokenize", tags=["tokens"])
def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, str]:
    """The text of token ids, special ones included."""
    state = state_of(http)
    state.check_model(body.model)
    target = state.llm.llm.target
    if target.tokenizer is None:
        raise ConfigurationError(f"{target.name} has no tokenizer")
    bad = next((token for token in body.tokens if not 0 <= token < target.vocab_size), None)
    if bad is not None:
        raise invalid(f"tokens has {bad}; allowed: 0 … {target.vocab_size - 1}", "tokens")
    return {"prompt": target.tokenizer.decode(body.tokens, skip_special_tokens=False)}


@router.get("/health", tags=["operation"])
async def health(http: Request) -> JSONResponse:
    """Alive: the engine has not failed."""
    state = state_of(http)
    if state.lost is not None:
        return JSONResponse({"status": "lost", "reason": state.lost}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready", tags=["operation"])
async def ready(http: Request) -> JSONResponse:
    """Can serve: the first real step has succeeded, and nobody has asked the server to leave."""
    state = state_of(http)
    status = "lost" if state.lost else "draining" if state.draining else "ready" if state.ready else "starting"
    return JSONResponse({"status": status, "model": state.model}, 200 if status == "ready" else 503)


@router.get("/version", tags=["operation"])
async def version() -> dict[str, str]:
    """Of surefoot."""
    return {"version": __version__}
