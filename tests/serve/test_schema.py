"""The OpenAPI description against the server: schemathesis makes requests of it."""

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{name}", "/v1/embeddings", "/pooling",
    "/v1/score", "/v1/rerank", "/tokenize", "/detokenize", "/v1/models/{name}",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_whatever_the_description_allows_is_answered_as_it_says(server, path):
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operation = next(op.ok() for op in schema.get_all_operations() if op.ok().path == path)

    @given(st.data())
    @settings(max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
              derandomize=True)  # fmt: skip
    def ask(data):
        case = data.draw(operation.as_strategy())
        case.call_and_validate(checks=[not_a_server_error, content_type_conformance, response_schema_conformance,
                                       status_code_conformance])  # fmt: skip

    ask()
    server.assert_idle()
