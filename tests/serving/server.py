"""A live server on a free port of this machine, over a tiny model: `serve()` in a `with` statement.

The model's vocabulary is that of a byte-level tokenizer with a chat template; its answers are noise, always the same at
temperature 0. `scripted(text)` is a target that says a given text instead, whatever the prompt, so that what a real model
would write (tool calls, reasoning) goes the whole way through engine, drafter and server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import uvicorn
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from surefoot import LLM, AsyncLLM
from surefoot.serving.app import create_app
from surefoot.serving.settings import ServeSettings
from surefoot.targets.target import Target
from tests.tiny_models import tiny_target
from tests.tiny_tokenizers import byte_level_tokenizer

TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor -%}"
    "<|end|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif -%}"
)


@cache
def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level, with the markers of Hermes' tool calls as ordinary added tokens, as Qwen has them."""
    made = byte_level_tokenizer()
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    made.chat_template = template
    return made


def tiny(template: str = TEMPLATE, architecture: str = "llama") -> Target:
    """A random model that speaks this tokenizer's tokens."""
    text = tokenizer(template)
    base = tiny_target.__wrapped__(architecture, vocab_size=len(text) + 3)  # a head that is padded beyond the tokenizer
    target = Target(base.model, text, name="tiny")
    target.eos_token_ids = frozenset({text.eos_token_id})
    return target


def scripted(said: str, template: str = TEMPLATE) -> Target:
    """A target that says `said` and its end token, whatever the prompt: its logits follow the output's position.

    Only temperature 0 makes sense.
    """
    target = tiny(template)
    text = tokenizer(template)
    script = [*text(said)["input_ids"], text.eos_token_id]
    honest = target.forward

    def forward(batch: Any, cache: Any, feature_layers: Any = ()) -> Any:
        output = honest(batch, cache, feature_layers)
        rows = batch.logit_rows
        logits = torch.full_like(output.logits, -20.0)
        begins = target.state.sampling.prompt_len[batch.row_slot[rows]]  # type: ignore[attr-defined]
        for row, said_already in enumerate((batch.positions[rows] + 1 - begins).tolist()):
            logits[row, script[min(max(said_already, 0), len(script) - 1)]] = 20.0
        return type(output)(logits, output.features)

    target.forward = forward  # type: ignore[method-assign]
    return target


def engine(target: Target, drafter: Any = "prompt-lookup", **options: Any) -> LLM:
    """An engine for tests; a scripted target learns where its tokens are."""
    gamma = None if drafter == "none" else 4
    settings = {"gamma": gamma, "cost_table": "none", "max_model_len": 512, "max_num_seqs": 8, "seed": 1, **options}
    llm = LLM(target, drafter=drafter, **settings)
    target.state = llm.engine.decode_step.state  # type: ignore[attr-defined]
    return llm


class Live:
    """A server that runs."""

    def __init__(self, llm: LLM, app: Any, port: int) -> None:
        self.llm, self.app, self.port = llm, app, port
        self.state = app.state.server
        self.url = f"http://127.0.0.1:{port}"

    def openai(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **options})

    def anthropic(self, **options: Any) -> Any:
        from anthropic import Anthropic

        return Anthropic(**{"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 60, **options})


@contextmanager
def serve(llm: LLM, on_lost: Any = None, listen: int = 0, **settings: Any) -> Iterator[Live]:
    """Serve an engine until the block ends, on the port `listen` (0: a free one); the engine is closed with it."""
    app = create_app(AsyncLLM(llm), ServeSettings(**settings), on_lost=on_lost)
    config = uvicorn.Config(app, host="127.0.0.1", port=listen, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server has not started"
    try:
        yield Live(llm, app, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        llm.close()
        assert not thread.is_alive()
