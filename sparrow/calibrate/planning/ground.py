"""From a surface to what its plans stand on: the model's shape, a machine, a workload."""

import json
from typing import Any

from sparrow.calibrate.planning.hardware import Hardware
from sparrow.calibrate.planning.plan import measured_to
from sparrow.calibrate.planning.pricing import Ground
from sparrow.calibrate.planning.workload import PROMPT, PUBLISHED, workload
from sparrow.models.spec import spec_from_hf
from sparrow.schema.surface import Surface


def ground_of(
    surface: Surface,
    hardware: Hardware,
    *,
    lengths: str | None = None,
    prompts: int | None = None,
    samples: int = 8,
    batch: int | None = None,
    prompt_tokens: int | None = None,
) -> Ground:
    """Where nothing is said, the workload is that of the surface's own answers.

    lengths        published, surface, or a file of lengths
    prompts        of a rollout, with `samples` answers each; None: the lengths as they are
    batch          sequences at once, at most
    prompt_tokens  of a prompt; None: as measured
    """
    usual = "surface" if surface.mode == "generated" and surface.lengths else PUBLISHED
    name = lengths or usual
    known = surface.prompt_tokens if name == "surface" else 0
    work = workload(
        name,
        measured=surface.lengths,
        prompts=prompts,
        samples=samples,
        most=batch,
        cutoff=measured_to(surface),
        prompt=prompt_tokens or known or PROMPT,
    )
    spec = spec_from_hf(_shape(surface), "the surface's model")
    return Ground(surface=surface, spec=spec, hardware=hardware, workload=work)


def _shape(surface: Surface) -> dict[str, Any]:
    try:
        shape = json.loads(surface.shape)
    except ValueError as error:
        raise ValueError(f"the surface's shape is no JSON: {error}") from error
    if not isinstance(shape, dict):
        raise ValueError(f"the surface's shape is no config.json of a model: {surface.shape:.60}")
    return shape
