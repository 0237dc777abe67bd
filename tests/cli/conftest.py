"""`surefoot.LLM` replaced by a stub, and a way to run the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.stub import Script, StubLLM


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """The script of the stub that stands in for `surefoot.LLM`."""
    script = Script()
    monkeypatch.setattr(StubLLM, "script", script, raising=False)
    monkeypatch.setitem(sys.modules, "surefoot.llm", SimpleNamespace(LLM=StubLLM))
    return script


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run `surefoot ARGS`; `stdout` and `stderr` are apart."""
    from surefoot.cli.app import app

    def invoke(*args: str, stdin: str | None = None) -> Any:
        result = CliRunner().invoke(app, list(args), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text; NaN and infinities, which Python would read, are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` (a tiny Llama that can chat), `base` (the same without a template), `drafter`, and `stranger`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefoot.drafters.checkpoint import save_drafter
    from surefoot.drafters.config import DSparkConfig
    from surefoot.drafters.dspark import DSparkDrafter
    from surefoot.drafters.model import DSparkModel
    from tests.tiny_tokenizers import byte_level_tokenizer

    home = tmp_path_factory.mktemp("checkpoints")
    tokenizer = byte_level_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_hidden_layers=2, eos_token_id=None, bos_token_id=None, pad_token_id=None, dtype=torch.float32
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    for name, template in (("base", None), ("target", CHAT_TEMPLATE)):
        tokenizer.chat_template = template
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    for name, width in (("drafter", 32), ("stranger", 40)):
        config = DSparkConfig(
            **{**sizes, "hidden_size": width},
            num_hidden_layers=1,
            block_size=3,
            mask_token_id=0,
            target_layer_ids=(0, 1),
            num_target_layers=2,
            markov_rank=4,
            enable_confidence_head=True,
        )
        save_drafter(DSparkDrafter(DSparkModel(config)), home / name)
    return home
