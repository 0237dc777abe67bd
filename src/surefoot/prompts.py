"""The forms in which a prompt or a conversation may be given, each reduced to a text or to a list of token ids.

A form that is not understood is refused. Guessing would complete something else than what was meant: iterating over a
mapping, for example, yields the names of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from surefoot.errors import ConfigurationError, PromptError, RequestError

if TYPE_CHECKING:
    import numpy as np
    import torch

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | np.ndarray[Any, Any] | torch.Tensor"
"""One prompt: a text, token ids (a list, tuple, one-dimensional array or tensor), `{"prompt": text}`,
`{"prompt_token_ids": ids}`, or what a tokenizer returns for one text."""

Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `role` and `content`, and whatever else the chat template reads."""

FORMS = (
    "a text, token ids (a list, or an array or tensor of one dimension), {'prompt': text}, {'prompt_token_ids': ids}, "
    "what a tokenizer returns, or a list of these"
)

_TOKENIZER_KEYS = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"}
_TEMPLATE_RESERVED = {
    *("conversation", "messages", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One prompt, or several, as a list of texts and lists of token ids.

    A sequence of numbers is one prompt; what a tokenizer returned for several texts is several.

    Raises:
        PromptError: a form that is not understood; the message names those that are.
    """
    given: Any = list(prompts) if isinstance(prompts, Iterator) else prompts
    if isinstance(given, Mapping) and _is_batch(given.get("input_ids")):
        return _tokenized_batch(given)
    if _is_sequence(given) and len(given) == 0:
        return []
    if _is_sequence(given) and _number(given[0]) is None:
        return [as_prompt(prompt) for prompt in given]
    return [as_prompt(given)]


def as_prompt(prompt: Prompt) -> str | list[int]:
    """One prompt as a text or as a list of token ids.

    Raises:
        PromptError: a form that is not understood; the message names those that are.
    """
    if isinstance(prompt, str):
        return checked_text(prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    return _token_ids(prompt)


def checked_text(text: str) -> str:
    """The text, if a tokenizer can read it. Bytes that are not UTF-8 arrive as lone surrogates, which none can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise RequestError(
            f"the prompt is not valid text: character {problem.start} stands for a byte that is not UTF-8; give UTF-8"
        ) from problem
    return text


def as_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as plain dictionaries; a content of several text parts becomes one text.

    Raises:
        PromptError: not a list of mappings that have a `role`.
        RequestError: an empty conversation, a part that is no text, or text that is not UTF-8.
    """
    if not _is_sequence(messages):
        raise PromptError(
            f"messages is {_described(messages)}; allowed: a list such as [{{'role': 'user', 'content': 'Hi'}}]"
        )
    if not messages:
        raise RequestError("the conversation is empty: give at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def conversation_tokens(
    tokenizer: Any, name: str, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    Args:
        tokenizer: the target's, or None.
        name: the target's name, for errors.
        template_kwargs: further variables of the chat template, such as `{"enable_thinking": False}`.

    Raises:
        RequestError: no chat template, messages it refuses, or a variable that it does not read.
        ConfigurationError: no tokenizer.
    """
    if tokenizer is None:
        raise ConfigurationError(f"{name} has no tokenizer: give prompts as token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            f"{name} has no chat template: give the prompt as plain text (llm.generate, or `surefoot generate` without "
            "--chat), or take a model that was tuned for chat"
        )
    variables = _template_variables(tokenizer, template_kwargs)
    plain = as_messages(messages)
    from jinja2 import TemplateError  # a dependency of transformers' chat templates

    try:
        encoded = tokenizer.apply_chat_template(
            plain, **{"add_generation_prompt": True, **variables}, tokenize=True, return_dict=True
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as problem:
        reason = " ".join(str(problem).split())
        raise RequestError(f"the chat template of {name} refuses this conversation: {reason}") from problem
    return list(encoded["input_ids"])


# --- inside -----------------------------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    """A numpy array or scalar, or a tensor, without importing either."""
    return hasattr(value, "ndim") and hasattr(value, "dtype") and hasattr(value, "tolist")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _number(value: Any) -> int | None:
    """A token id, or None for what is no whole number."""
    if type(value) is int:
        return value
    if _is_array(value) and value.ndim == 0:
        value = value.tolist()
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _token_ids(value: Any) -> list[int]:
    if _is_array(value):
        if value.ndim != 1:
            raise PromptError(
                f"prompt is {_described(value)}; allowed: {FORMS}; give the rows of an array as list(array)"
            )
        value = value.tolist()
    if not _is_sequence(value):
        raise PromptError(f"prompt is {_described(value)}; allowed: {FORMS}")
    ids = [_number(item) for item in value]
    if None in ids:
        bad = ids.index(None)
        raise PromptError(f"item {bad} of a list of token ids is {_described(value[bad])}; allowed: {FORMS}")
    return ids  # type: ignore[return-value]


def _from_mapping(prompt: Mapping[str, Any]) -> str | list[int]:
    keys = set(prompt)
    if keys == {"prompt"}:
        inner = prompt["prompt"]
        if isinstance(inner, Mapping):
            raise PromptError(f"'prompt' is {_described(inner)}; allowed: {FORMS}")
        return as_prompt(inner)
    if keys == {"prompt_token_ids"}:
        return _token_ids(prompt["prompt_token_ids"])
    if "input_ids" in keys and keys <= _TOKENIZER_KEYS:
        if _is_batch(prompt["input_ids"]):
            batch = _tokenized_batch(prompt)
            if len(batch) != 1:
                raise PromptError(
                    f"prompt holds {len(batch)} tokenized texts where one is allowed: give them one by one"
                )
            return batch[0]
        return _without_padding(prompt["input_ids"], prompt.get("attention_mask"))
    raise PromptError(f"prompt is {_described(prompt)}; allowed: {FORMS}")


def _is_batch(input_ids: Any) -> bool:
    """Whether a tokenizer's `input_ids` are of several texts (or of one, in a list)."""
    if _is_array(input_ids):
        return bool(input_ids.ndim == 2)
    return _is_sequence(input_ids) and len(input_ids) > 0 and _number(input_ids[0]) is None


def _tokenized_batch(encoded: Mapping[str, Any]) -> list[str | list[int]]:
    if unknown := set(encoded) - _TOKENIZER_KEYS:
        raise PromptError(f"prompt has the key {sorted(map(str, unknown))[0]!r} beside 'input_ids'; allowed: {FORMS}")
    ids = encoded["input_ids"]
    masks = encoded["attention_mask"] if encoded.get("attention_mask") is not None else [None] * len(ids)
    return [_without_padding(row, mask) for row, mask in zip(ids, masks, strict=True)]


def _without_padding(input_ids: Any, mask: Any) -> list[int]:
    ids = _token_ids(input_ids)
    if mask is None:
        return ids
    kept = _token_ids(mask)
    if len(kept) != len(ids):
        raise PromptError(f"attention_mask has {len(kept)} entries for {len(ids)} input_ids: they must be equally many")
    return [token for token, keep in zip(ids, kept, strict=True) if keep]


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"message {index} is {_described(message)}; allowed: a mapping such as {{'role': 'user', 'content': 'Hi'}}"
        )
    plain = dict(message)
    content: Any = plain.get("content")
    if isinstance(content, str):
        checked_text(content)
    elif _is_sequence(content):
        plain["content"] = "".join(_text_part(index, part) for part in content)
    elif content is not None:
        raise PromptError(
            f"content of message {index} is {_described(content)}; allowed: a text, or a list of text parts"
        )
    elif "tool_calls" not in plain:
        raise PromptError(f"message {index} has no content; allowed: a text, or a list of text parts")
    return plain


def _text_part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return checked_text(part)
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return checked_text(part["text"])
    kind = repr(part["type"]) if isinstance(part, Mapping) and "type" in part else _described(part)
    raise RequestError(
        f"message {index} has a part of the type {kind}; allowed: {{'type': 'text', 'text': …}}: this engine reads text only"
    )


def _template_variables(tokenizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`given`, if the chat template reads all of it: a misspelt variable would change nothing, and nobody would notice."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise PromptError(
            f"chat_template_kwargs is {_described(given)}; allowed: a mapping such as {{'enable_thinking': False}}"
        )
    if reserved := sorted(_TEMPLATE_RESERVED & set(given)):
        raise RequestError(f"chat_template_kwargs has {reserved[0]!r}, which surefoot sets itself: leave it out")
    arguments = {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    read = _variables_read(tokenizer, given)
    if read is not None and (unread := sorted(set(given) - arguments - read)):
        raise RequestError(
            f"chat_template_kwargs has {unread[0]!r}, which this model's chat template does not read; "
            f"it reads: {', '.join(sorted(read - {'messages'})) or 'none'}"
        )
    return dict(given)


def template_variables_read(tokenizer: Any) -> frozenset[str]:
    """Variables that the tokenizer's chat template reads, `messages` aside; none where it cannot be parsed by itself."""
    found: set[str] = set()
    empty: list[dict[str, Any]] = [{}]
    for tools in (None, empty):  # a tokenizer may have a template of its own for tools
        found |= _variables_read(tokenizer, {"tools": tools}) or set()
    return frozenset(found - {"messages"})


def _variables_read(tokenizer: Any, given: Mapping[str, Any]) -> set[str] | None:
    """Names that the template takes from outside; None where it cannot be parsed by itself."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = tokenizer.get_chat_template(given.get("chat_template"), tools=given.get("tools"))
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = find_undeclared_variables(environment.parse(template))
    except TemplateError:  # a tag that only transformers knows
        return None
    return names - {"raise_exception", "strftime_now", *tokenizer.special_tokens_map}


def _described(value: Any) -> str:
    """What was given, short enough for one line."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {', '.join(map(repr, value)) or '(none)'}"
    if _is_array(value):
        return f"a {kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    text = repr(value) if isinstance(value, (str, bytes)) else ""
    return f"{kind} {text[:37] + '…' if len(text) > 38 else text}".rstrip()
