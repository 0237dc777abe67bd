"""Tool calls in the text of an answer, as the common families of models write them.

| format | how a call is written |
|---|---|
| hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3) |
| llama3 | `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or alone; several with `;` between them |
| pythonic | `[f(a=1), g(b="x")]` (Llama 3.2 and 4) |
| mistral | `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| deepseek | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), or V3's code block |

What looks like a call and turns out to be none is text, to the last character, unless a part of it has been told already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from surefoot.serving.parsing.json_calls import JsonCalls, Llama3Calls
from surefoot.serving.parsing.named_calls import MistralCalls, NamedCalls, deepseek_calls
from surefoot.serving.parsing.pythonic import PythonicCalls

ToolStage = JsonCalls | NamedCalls | MistralCalls | PythonicCalls

TOOL_STAGES: dict[str, Callable[[Collection[str]], ToolStage]] = {
    "hermes": lambda names: JsonCalls(names, "<tool_call>", "</tool_call>"),
    "llama3": lambda names: Llama3Calls(names),
    "pythonic": PythonicCalls,
    "mistral": MistralCalls,
    "deepseek": deepseek_calls,
}
"""By the name of the format."""
