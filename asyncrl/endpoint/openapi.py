"""The OpenAPI document of the routes, made from the models that validate requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ERRORS = {"400": "a parameter is wrong, or not supported", "401": "no key, a wrong key, or an ended episode"}
_ERRORS |= {"408": "the body was too slow", "413": "the body is too large", "415": "not JSON"}
_ERRORS |= {"429": "too many open requests", "500": "the server failed", "503": "the run ends"}


def document(bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """`bodies`: path of a route -> model of its body."""
    schemas, definitions = models_json_schema(
        [(body, "validation") for body in bodies.values()], ref_template="#/components/schemas/{model}"
    )
    content = {"application/json": {"schema": {"type": "object"}}}
    reasons = {"200": "the answer", **_ERRORS}
    answers: dict[str, Any] = {status: {"description": why, "content": content} for status, why in reasons.items()}
    stream: dict[str, Any] = {"text/event-stream": {}}
    paths: dict[str, Any] = {
        "/v1/models": {"get": {"responses": {status: answers[status] for status in ("200", "401")}}}
    }
    for path, body in bodies.items():
        full = path if path.startswith("/inference") else f"/v1{path}"
        sent = {"required": True, "content": {"application/json": {"schema": schemas[body, "validation"]}}}
        ok = answers["200"] | {"content": content | stream}
        paths[full] = {"post": {"requestBody": sent, "responses": answers | {"200": ok}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncrl", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
