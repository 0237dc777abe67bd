"""The served OpenAPI schema, fuzzed: no request makes the server fail, and every answer is one that is documented."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.server import Live, engine, serve, tiny

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SAID = {"messages": [{"role": "user", "content": "a stop"}]}
VALID = {
    "/v1/completions": {"prompt": "def"},
    "/v1/chat/completions": SAID,
    "/v1/responses": {"input": "a stop"},
    "/v1/messages": {**SAID, "model": "tiny", "max_tokens": 3},
    "/v1/messages/count_tokens": {**SAID, "model": "tiny"},
    "/tokenize": {"prompt": "def"},
    "/detokenize": {"tokens": [3, 4]},
}
"""What is answered with 200; a generated request seldom is."""
KNOWN = [path for path in VALID if path.startswith("/v1")]


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    with serve(engine(tiny(), max_model_len=64), max_output_tokens=4, request_timeout_s=10) as live:
        yield live


PATIENCE = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_request_makes_the_server_fail(served: Live) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    tried: Counter[str] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.startswith("/live"):  # a stream without an end
            continue

        @PATIENCE
        @given(case=operation.as_strategy())
        def run(case: schemathesis.Case) -> None:
            tried[f"{case.path} {case.call_and_validate(checks=CHECKS, timeout=60).status_code}"] += 1

        run()
        if operation.path in VALID:
            case = operation.Case(body=VALID[operation.path], media_type="application/json")
            tried[f"{operation.path} valid {case.call_and_validate(checks=CHECKS, timeout=60).status_code}"] += 1
    for path in KNOWN:
        assert tried[f"{path} 400"] > 3, tried
    for path in VALID:
        assert tried[f"{path} valid 200"] == 1, tried


def test_the_schema_names_what_is_served(served: Live) -> None:
    found = httpx.get(f"{served.url}/openapi.json").json()
    assert set(KNOWN) <= set(found["paths"])
    for path in KNOWN:
        operation = found["paths"][path]["post"]
        assert operation["summary"]
        assert {"200", "400", "401", "429", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
    fields = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "response_format", "prediction", "max_completion_tokens", "logit_bias"} <= set(fields)
    assert json.dumps(found).count("HTTPValidationError") == 0
    assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 200
