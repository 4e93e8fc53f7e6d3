"""Who runs where on a Ray cluster: actors by role, and what each takes; without Ray itself."""

from sparrow.models.checkpoint import pick_device
from sparrow.schema.train import TrainConfig

Resources = dict[str, float]


def actor_resources(config: TrainConfig) -> dict[str, Resources]:
    """What an actor of each role takes."""
    cuda = config.model.device == "cuda" or pick_device(config.model.device).type == "cuda"
    engine = {"CPU": 1.0, "GPU": config.run.gpu_share} if cuda else {"CPU": 1.0}
    whole = {"CPU": 1.0, "GPU": 1.0} if cuda else engine  # NCCL wants a GPU for each of several
    learner = engine if config.run.ranks == 1 else whole
    return {"learner": learner, "rollout": engine, "judge": {"CPU": 1.0}, "evaluation": engine}


def count_actors(config: TrainConfig) -> dict[str, int]:
    """Actors by role; a synchronous run has an engine and judges in every rank."""
    if config.run.loop == "sync":
        return {"learner": config.run.ranks}
    workers, held = config.dispatch.workers, int(config.validation.every > 0)
    return {"learner": config.run.ranks, "rollout": workers, "judge": workers, "evaluation": held}


def describe_placement(config: TrainConfig) -> str:
    """The actors of a run in one line."""
    each = actor_resources(config)
    roles = [
        f"{count} {role} ({describe_resources(each[role])} each)"
        for role, count in count_actors(config).items()
        if count
    ]
    judges = "; a judge runs beside its rollout worker" if config.run.loop == "async" else ""
    return f"{config.run.ray}: {', '.join(roles)}; learner and evaluation close together{judges}"


def describe_resources(resources: Resources) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources)
