"""The OpenAPI document of the server: bodies, which routes read themselves, answers and errors."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sparrow.schema.openai import ChatRequest, CompletionRequest, GenerationRequest
from sparrow.serve.responses import Json
from sparrow.serve.service import Service

OPEN_ROUTES = ("/health", "/ready")  # without a key
SCHEMAS = "#/components/schemas/"
TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
OPTIONAL_TEXT: Json = {"type": ["string", "null"]}
OPTIONAL_OBJECT: Json = {"type": ["object", "null"]}
BODIES: dict[str, type[GenerationRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
STREAM: Json = {"text/event-stream": {}}
ERRORS = {  # besides 500, and 401 where there is a key
    "/ready": (503,),
    "/v1/models/{name}": (404,),
    **dict.fromkeys(BODIES, (400, 404, 413, 429, 503)),
}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _const(value: str) -> Json:
    return {"type": "string", "const": value}


def _ref(name: str) -> Json:
    return {"$ref": f"{SCHEMAS}{name}"}


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}


def _answer(kind: str, **part: Json) -> Json:
    choice = _object(index=INTEGER, **part, logprobs=OPTIONAL_OBJECT, finish_reason=TEXT)
    about = {"id": TEXT, "object": _const(kind), "created": INTEGER, "model": TEXT}
    return _object(**about, choices=_list(choice), usage=_ref("Usage"))


MESSAGE = _object(role=_const("assistant"), content=OPTIONAL_TEXT)
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
ANSWERS: Json = {
    "Error": _object(
        error=_object(message=TEXT, type=TEXT, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT)
    ),
    "Usage": _object(**dict.fromkeys(COUNTS, INTEGER)),
    "Model": _object(id=TEXT, object=_const("model"), created=INTEGER, max_model_len=INTEGER),
    "Models": _object(object=_const("list"), data=_list(_ref("Model"))),
    "Completion": _answer("text_completion", text=TEXT),
    "ChatCompletion": _answer("chat.completion", message=MESSAGE),
    "Status": _object(status=TEXT),
}
CONTENT: dict[str, Json] = {
    "/health": _json("Status"),
    "/ready": _json("Status"),
    "/metrics": {"text/plain": {"schema": TEXT}},
    "/v1/models": _json("Models"),
    "/v1/models/{name}": _json("Model"),
    "/v1/completions": _json("Completion") | STREAM,
    "/v1/chat/completions": _json("ChatCompletion") | STREAM,
}
GIVEN, NULL, EMPTY = {"type": ["string", "array"]}, {"type": "null"}, {"maxItems": 0}
NO_CALLS: Json = {"tool_calls": EMPTY, "reasoning_content": NULL}
MESSAGES = (  # which keys a message has, by role
    (
        {"enum": ["system", "developer", "user"]},
        {"content": GIVEN},
        {"tool_call_id": NULL} | NO_CALLS,
    ),
    ({"const": "assistant"}, {"content": GIVEN}, {"tool_call_id": NULL}),
    ({"const": "assistant"}, {"tool_calls": {"minItems": 1}}, {"tool_call_id": NULL}),
    ({"const": "tool"}, {"content": GIVEN, "tool_call_id": TEXT}, NO_CALLS),
)


def describe(app: FastAPI, service: Service) -> Json:
    """Return the document of an app; the only model that requests may name is the service's."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    key = service.config.key is not None
    schemas: Json = dict(ANSWERS)
    for path, kind in BODIES.items():
        schema = kind.model_json_schema(ref_template=f"{SCHEMAS}{{model}}")
        schemas |= schema.pop("$defs", {})
        schema["properties"]["model"]["enum"] = [service.name]
        schemas[kind.__name__] = schema
        body = {"required": True, "content": _json(kind.__name__)}
        name = path.removeprefix("/v1/").replace("/", "_")
        made["paths"][path] = {"post": {"operationId": name, "requestBody": body}}
    schemas["Message"]["anyOf"] = [
        {"properties": {"role": role} | required | others, "required": list(required)}
        for role, required, others in MESSAGES
    ]
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, key=key)
    made["components"] = {"schemas": schemas}
    if key:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
        for path in OPEN_ROUTES:
            made["paths"][path]["get"]["security"] = []
    return made


def _responses(path: str, *, key: bool) -> dict[str, Any]:
    unauthorised = (401,) if key and path not in OPEN_ROUTES else ()
    statuses = (*ERRORS.get(path, ()), *unauthorised, 500)
    error = {"description": "An error.", "content": _json("Error")}
    answer = {"description": "The answer.", "content": CONTENT[path]}
    return {"200": answer, **{str(status): error for status in statuses}}
