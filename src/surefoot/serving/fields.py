"""The sampling fields that the endpoints share, and what becomes of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surefoot.sampling import SamplingParams
from surefoot.serving.errors import invalid
from surefoot.structured import StructuredOutput

UNSUPPORTED = {
    "suffix": "the target only continues texts: leave suffix out",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this server answers with text",
    "web_search_options": "this server searches nothing",
    "use_beam_search": "beam search is not offered: leave it out",
    "prompt_embeds": "give the prompt as text or token ids",
    "truncate_prompt_tokens": "prompts are never cut: shorten it",
    "guided_whitespace_pattern": "leave it out",
}
"""Fields of comparable servers that would change the answer and are not offered; every other unknown field is ignored."""


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = Field(default=None, description="A last chunk with the usage of the whole request.")
    include_origins: bool | None = Field(
        default=None,
        description="How every token came, in `surefoot.origins` of each choice. An extension of surefoot.",
    )


class SamplingFields(BaseModel):
    """Fields of every endpoint that generates. Ranges are those of `SamplingParams`; docs/server.md lists them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(default=None, description="The served model; may be left out.")
    temperature: float | None = Field(default=None, description="0 is greedy; 1, the default, the target's own law.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    gamma: int | None = Field(default=None, description="Most draft tokens per step. An extension of surefoot.")
    speculative: bool | None = Field(default=None, description="false decodes target-only. An extension of surefoot.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: dict[str, Any] | str | None = Field(
        default=None, description='A text the answer may repeat: {"type": "content", "content": TEXT}.'
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object, or json_schema with its schema."
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="One of json, json_object, regex, choice, grammar, structural_tag."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def params(self, **given: Any) -> SamplingParams:
        """The sampling parameters that the fields ask for; `given` comes on top.

        Raises:
            ApiError, RequestError: a field that is not offered, or a value out of its range.
        """
        for name in self.model_extra or {}:
            if name in UNSUPPORTED and self.model_extra and self.model_extra[name] is not None:
                raise invalid(f"{name} is not supported: {UNSUPPORTED[name]}", name)
        names = (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("logit_bias", "seed", "n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
            *("min_tokens", "skip_special_tokens", "priority", "gamma", "speculative"),
        )
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        best_of = (self.model_extra or {}).get("best_of")
        if best_of is not None and best_of != (self.n or 1):
            said["best_of"] = best_of
        return SamplingParams(**{**said, "structured": self.structured(), **given})

    def structured(self) -> StructuredOutput | None:
        """The form that the answer must have."""
        forms = [
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
        ]
        found: list[tuple[str, dict[str, Any]]] = [
            (field, {name: value}) for field, name, value in forms if value is not None
        ]
        if self.structured_outputs is not None:
            given = {name: value for name, value in self.structured_outputs.items() if value is not None}
            if "json" in given:
                given["json_schema"] = given.pop("json")
            unknown = sorted(
                set(given) - {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
            )
            if unknown:
                raise invalid(f"structured_outputs has {unknown[0]!r}, which is not offered", "structured_outputs")
            found.append(("structured_outputs", given))
        if (given_format := self._response_format()) is not None:
            found.append(("response_format", given_format))
        if len(found) > 1:
            names = " and ".join(field for field, _ in found)
            raise invalid(f"{names} are given together: give one of them", found[1][0])
        return StructuredOutput(**found[0][1]) if found else None

    def _response_format(self) -> dict[str, Any] | None:
        return None if self.response_format is None else read_format(self.response_format, "response_format")

    def prediction_text(self) -> str | None:
        """The text of `prediction`, in any of the forms it is sent in."""
        given = self.prediction
        if given is None or isinstance(given, str):
            return given
        content = given.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
        if given.get("type") != "content" or not isinstance(content, str):
            raise invalid('prediction must be {"type": "content", "content": TEXT}', "prediction")
        return content

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_origins(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_origins)


def read_format(given: dict[str, Any], field: str) -> dict[str, Any] | None:
    """OpenAI's form of an answer's form, as arguments of `StructuredOutput`; None for plain text.

    Raises:
        ApiError: one that is not offered.
    """
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = given.get("json_schema", given)  # the Responses API does without the inner object
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise invalid(f"{field} of the type json_schema needs json_schema.schema, a JSON schema", field)
        return {"json_schema": schema}
    if kind == "structural_tag":
        return {"structural_tag": given}
    raise invalid(f"{field}.type is {kind!r}; allowed: text, json_object, json_schema", f"{field}.type")
