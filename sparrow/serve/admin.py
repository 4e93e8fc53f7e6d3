"""The admin port of a server, for trainers: weights, schedule, sleep, abort. Its key is its own.

GET  /admin/status
POST /admin/weights?in_flight=keep    a weight delta (sparrow.models.deltas), or a whole version;
                                      ?id=...: what answers then have as `weights_id`
POST /admin/weights?reset=true        a whole version with any number, as of another run
POST /admin/adapter?alpha=16          of sparse decoding: safetensors with PEFT's names; "": none
POST /admin/schedule                  {"schedule": {...}} or null, for requests that name none
POST /admin/sleep, /admin/wake        {"weights": "host"}: free the memory, allocate it again
POST /admin/abort                     end all requests in flight
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, get_args

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparrow.engine.answer import DENSE, ResolvedDecoding
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.models import hf_views
from sparrow.models.deltas import Delta
from sparrow.models.lora import Adapter
from sparrow.schema.base import from_dict
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import InFlight
from sparrow.serve.app import HttpError, RequestMiddleware, error_response, read_body
from sparrow.serve.responses import Json
from sparrow.serve.service import Service

SMALL = 2**20  # bytes of a body without weights
SPARE = 2**26  # bytes that a whole version may have beside its weights: headers, poor compression

Action = Callable[[Service, Request], Awaitable[Json]]


def make_admin_app(service: Service) -> Starlette:
    """The app over a service whose engine another app runs, and is awake."""
    most = SPARE + sum(view.nbytes for view in hf_views(service.engine.model).values())
    actions: dict[str, Action] = {
        "weights": partial(_weights, most),
        "adapter": _adapter,
        "schedule": _schedule,
        "sleep": _sleep,
        "wake": _wake,
        "abort": _abort,
    }
    routes = [
        Route(f"/admin/{name}", partial(_act, service, action), methods=["POST"])
        for name, action in actions.items()
    ]
    routes.append(Route("/admin/status", partial(_act, service, _status), methods=["GET"]))
    key = service.config.admin_secret
    middleware = Middleware(RequestMiddleware, service=service, key=key, open_routes=())
    return Starlette(routes=routes, middleware=[middleware])


async def _act(service: Service, action: Action, request: Request) -> Response:
    try:
        return JSONResponse(await action(service, request))
    except HttpError as error:
        return error_response(error.status, str(error), error.code, error.param)
    except ValueError as error:  # the engine's own checks: nothing was changed
        return error_response(409, f"{error}.", "refused")


async def _status(service: Service, _: Request) -> Json:
    return await service.rollouts.run(partial(_about, service))


def _about(service: Service, engine: Engine) -> Json:
    schedule = service.decoding.schedule
    return {
        "version": engine.version,
        "digest": f"{engine.digest():016x}" if engine.ready else None,
        "weights_id": service.weights_id,
        "asleep": engine.asleep,
        "samples_in_flight": service.sampler.in_flight,
        "schedule": None if schedule is None else schedule.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


async def _weights(most: int, service: Service, request: Request) -> Json:
    in_flight = request.query_params.get("in_flight", "recompute")
    if in_flight not in get_args(InFlight):
        raise HttpError(
            400,
            f"in_flight must be one of {', '.join(get_args(InFlight))}.",
            "invalid",
            "in_flight",
        )
    reset = request.query_params.get("reset", "false") == "true"
    data = await read_body(request, most)
    try:
        delta = Delta.decode(data)
    except ValueError as error:
        raise HttpError(400, f"{error}.", "invalid_delta") from error
    settings: Any = {"in_flight": in_flight, "reset": reset}

    def load(engine: Engine) -> int:
        tokens = engine.apply_delta(delta, **settings)
        service.weights_id = request.query_params.get("id") or secrets.token_hex(8)
        return tokens

    tokens = await service.rollouts.run(load)
    return {"version": delta.version, "tokens_in_flight": tokens}


async def _adapter(service: Service, request: Request) -> Json:
    data = await read_body(request, SPARE)
    adapter = _read_adapter(service, request, data) if data else None
    await service.rollouts.run(lambda engine: engine.set_actor(adapter))
    return {"rank": 0 if adapter is None else adapter.rank}


def _read_adapter(service: Service, request: Request, data: bytes) -> Adapter:
    model, asked = service.engine.model, request.query_params
    try:
        tensors = load_safetensors(data)
        dtype = next(iter(tensors.values())).dtype if tensors else model.dtype
        return Adapter.from_state(
            model.spec,
            tensors,
            alpha=float(asked.get("alpha", "nan")),
            rslora=asked.get("rslora", "false") == "true",
            dtype=dtype,
            device=model.device,
        )
    except (ValueError, SafetensorError) as error:
        raise HttpError(400, f"{error}.", "invalid_adapter") from error


async def _schedule(service: Service, request: Request) -> Json:
    data = await _json(request)
    if data.keys() != {"schedule"}:
        raise HttpError(400, 'The body must be {"schedule": ...}.', "invalid", "schedule")
    if data["schedule"] is None:
        service.decoding = DENSE
        return {"schedule": None}
    try:
        schedule = from_dict(Schedule, data["schedule"])
    except ValueError as error:
        raise HttpError(400, f"{error}.", "invalid", "schedule") from error
    rule, exact = service.engine.rule, service.decoding.speculative
    assert rule is not None
    rule.check(schedule, page=PAGE, family=service.engine.model.spec.family)
    service.decoding = ResolvedDecoding(schedule, rule.flow, exact)
    return {"schedule": schedule.name}


async def _sleep(service: Service, request: Request) -> Json:
    weights = (await _json(request)).get("weights", "host")
    await service.rollouts.run(lambda engine: engine.sleep(weights=weights))
    return await _status(service, request)


async def _wake(service: Service, request: Request) -> Json:
    await service.rollouts.run(lambda engine: engine.wake())
    return await _status(service, request)


async def _abort(service: Service, _: Request) -> Json:
    def abort(engine: Engine) -> int:
        requests = list(engine.loop.requests)
        for number in requests:
            engine.abort(number)
        return len(requests)

    return {"aborted": await service.rollouts.run(abort)}


async def _json(request: Request) -> dict[str, Any]:
    body = await read_body(request, SMALL)
    try:
        data = json.loads(body or b"{}")
    except ValueError as error:
        raise HttpError(400, "The body is no JSON.", "invalid") from error
    if not isinstance(data, dict):
        raise HttpError(400, "The body must be a JSON object.", "invalid")
    return data
