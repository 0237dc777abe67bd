"""Every option of the server: one frozen object, checked once, when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError
from surefoot.validation import choice, integer, number, shown

KEY_VARIABLE = "SUREFOOT_API_KEY"
"""Environment variable with API keys, separated by commas."""
TOOL_PARSERS = ("auto", "none", "hermes", "llama3", "pythonic", "mistral", "deepseek")
REASONING_PARSERS = ("auto", "none", "think")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServeSettings:
    """Options of the server; a wrong value raises `ConfigurationError`.

    Args:
        host: address to listen on. Everything but 127.0.0.1 can be reached from other machines.
        port: 0 takes a free one.
        api_keys: if any, every request but those to `/health` and `/ready` must bring one of them.
        served_model_name: what `/v1/models` and the answers call the model; None takes the target's name.
        max_body_bytes: largest request body.
        max_prompt_tokens: longest prompt; None leaves only the model's context.
        max_output_tokens: most tokens of one answer; None leaves only the model's context.
        max_queue: answers that may wait for a slot; more are refused with 429.
        max_streams: requests that may be under way at once, waiting ones included.
        max_batch: prompts of one request.
        request_timeout_s: a request that takes longer ends with what it has; None never.
        drain_s: after SIGTERM, answers under way have so long to end.
        cors_origins: origins of web pages that may call the server; none by default.
        chat_template_kwargs: variables of the chat template that requests may override.
        tool_parser, reasoning_parser: how tool calls and reasoning are written; `auto` reads it off the chat template.
        metrics_need_key: `/metrics` and the live page's feed ask for a key, too, where there are keys.
        log_format: `text` or `json`, one line per request.
        replica: the name of this replica among several; answers carry it as `X-Replica`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: str | None = None
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_queue: int = 256
    max_streams: int = 1024
    max_batch: int = 256
    request_timeout_s: float | None = 600.0
    drain_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    metrics_need_key: bool = True
    log_format: str = "text"
    replica: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigurationError(f"host is {shown(self.host)}; allowed: an address; 127.0.0.1 is this machine only")
        self._integer("port", 0, 65535, "0 takes a free one")
        self._integer("max_body_bytes", 1024, 1 << 40, "8388608 is the default")
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if getattr(self, name) is not None:
                self._integer(name, 1, 1 << 31, "leave it out for the model's own limit")
        self._integer("max_queue", 0, 1 << 20, "0 refuses whatever finds no free slot")
        self._integer("max_streams", 1, 1 << 20, "1024 is the default")
        self._integer("max_batch", 1, 1 << 16, "256 is the default")
        if self.request_timeout_s is not None:
            self._number("request_timeout_s", 0.001, "leave it out for ten minutes")
        self._number("drain_s", 0.0, "30 is the default")
        choice("tool_parser", self.tool_parser, TOOL_PARSERS, ConfigurationError, remedy="auto asks the model")
        choice(
            "reasoning_parser",
            self.reasoning_parser,
            REASONING_PARSERS,
            ConfigurationError,
            remedy="auto asks the model",
        )
        choice("log_format", self.log_format, LOG_FORMATS, ConfigurationError, remedy="json is for programs")
        for key in self.api_keys:
            if not isinstance(key, str) or len(key) < 8 or not key.isascii() or any(c.isspace() for c in key):
                raise ConfigurationError(
                    "an API key is shorter than 8 characters, or has spaces or other than ASCII in it"
                )

    def _integer(self, name: str, low: int, high: int, remedy: str) -> None:
        value = integer(name, getattr(self, name), ConfigurationError, low=low, high=high, remedy=remedy)
        object.__setattr__(self, name, value)

    def _number(self, name: str, low: float, remedy: str) -> None:
        value = number(name, getattr(self, name), ConfigurationError, low=low, high=1e9, remedy=remedy)
        object.__setattr__(self, name, value)


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Keys from a file (one a line, # begins a comment) or else from the environment.

    Raises:
        ConfigurationError: a file that cannot be read, or holds no key. Never shows a key.
    """
    if path is None:
        return tuple(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"api-key-file is {path}, which cannot be read: {problem}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigurationError(f"api-key-file is {path}, which holds no key: write one a line")
    return keys
