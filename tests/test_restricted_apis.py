"""Restricted APIs and forwarded headers, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support import Echo, get, infer_echo, post, serving
from trio_infer import InferRequest, Model, TensorSpec
from trio_infer.api.restrictions import CATEGORIES, Restrictions
from trio_infer.api.routes import CATEGORY_OF, find_route
from trio_infer.api.v2 import _ANSWERS
from trio_infer.errors import SetupError


class Telling(Model):
    """Gives its parameters, as JSON."""

    name = "telling"
    inputs = (TensorSpec("x", "FP32", [-1], optional=True),)
    outputs = (TensorSpec("parameters", "BYTES", [1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"parameters": np.array([json.dumps(dict(request.parameters))], object)}


async def test_a_restricted_api_answers_only_who_sends_the_header() -> None:
    rules = ["health,metadata:Admin-Key=se=cret:1", "inference:infer-key=other"]
    async with serving(Echo(), memory=True, restricted_apis=rules) as served:
        client = served.connect_in_memory()
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready", "/v2", "/v2/models/echo"):
            answer = await client.ask(get(path))
            assert (answer.status, answer.json) == (
                403,
                {"error": "This API is restricted, expecting header 'Admin-Key'"},
            ), path
            assert (await client.ask(get(path, "admin-key: se=cret:2"))).status == 403
            assert (await client.ask(get(path, "ADMIN-KEY: se=cret:1"))).status == 200, path
        assert (await client.ask(get("/v2/models/echo/config"))).status == 200
        assert (await client.ask(infer_echo(1))).status == 403
        answer = await client.ask(post("echo", "infer", b"", "Infer-Key: other"))
        assert answer.status == 200
        # Nothing is told: not that a model is unknown, nor that a method is wrong.
        assert (await client.ask(post("nobody", "infer", b""))).status == 403
        assert (await client.ask(get("/v2/health/live", method="DELETE"))).status == 403
        assert (await client.ask(get("/v2/models/echo/infer", "Infer-Key: \xe4"))).status == 403


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (["health:a=b", "health:c=d"], "api 'health' can not be specified in multiple config groups"),
        (["health,health:a=b"], "api 'health' can not be specified in multiple config groups"),
        (["helth:a=b"], "unknown restricted api 'helth'"),
        ([":a=b"], "unknown restricted api ''"),
        (["health"], "must be CATEGORY"),
        (["health:a"], "must be CATEGORY"),
        (["health:a="], "must be CATEGORY"),
        (["health:a b=c"], "must be CATEGORY"),
    ],
)
def test_a_rule_that_can_not_be_meant_is_refused_at_the_start(rules: list[str], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        Restrictions.parse(rules)


def test_every_endpoint_belongs_to_a_category() -> None:
    assert set(CATEGORY_OF) >= set(_ANSWERS)
    assert set(CATEGORY_OF.values()) <= set(CATEGORIES)
    route = find_route("/v2/models/m/versions/1/generate_stream")
    assert route is not None
    assert route.category == "inference"


async def test_headers_that_match_are_parameters_of_infer_and_the_request_s_own_come_first() -> None:
    async with serving(Telling(), memory=True, header_forward_pattern="^x-|priority") as served:
        client = served.connect_in_memory()
        headers = ("X-Tenant: blue", "x-own: header", "Priority: 7", "Y: no")
        document = {"inputs": [], "parameters": {"x-own": 5}}
        answer = await client.ask(post("telling", "infer", document, *headers))
        assert json.loads(answer.json["outputs"][0]["data"][0]) == {"X-Tenant": "blue", "x-own": 5}
        answer = await client.ask(post("telling", "generate", {}, *headers))
        assert json.loads(answer.json["parameters"]) == {}, "infer only, as Triton has it"
