"""surefoot: speculative decoding that only steps where it is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.version import __version__

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from surefoot.async_llm import AsyncLLM
    from surefoot.llm import LLM
    from surefoot.sampling import SamplingParams

_EXPORTS = {"LLM": "surefoot.llm", "AsyncLLM": "surefoot.async_llm", "SamplingParams": "surefoot.sampling"}


def __getattr__(name: str) -> Any:  # lazy: `import surefoot.speculation` must not load transformers
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
