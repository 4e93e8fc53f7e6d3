"""Upload a trained model to the Hugging Face hub, with a model card made from its run."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparrow import __version__
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.evaluation import load_policy, policy_folder
from sparrow.dataflow.run_files import CHECKPOINTS
from sparrow.files import has_sums, read_sums, verify
from sparrow.models import save
from sparrow.models.sources import policy_folders
from sparrow.models.spec import CONFIG
from sparrow.schema.common import PushConfig
from sparrow.schema.run_folder import METRICS, MODEL, RunFolder, read_run
from sparrow.schema.types import Report

CARD = "README.md"
SETTINGS = (
    *("algorithm.name", "algorithm.kl", "optimiser.rate", "rollout.prompts", "rollout.samples"),
    *("rollout.max_tokens", "run.seed"),
)


def push(config: PushConfig, *, report: Report) -> str:
    """Upload in one commit; the address of the repository."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if get_token() is None:
        raise ValueError(
            "no Hugging Face token: run `hf auth login`, or set HF_TOKEN, with one that may write"
        )
    with model_files(config.run, config.step, report, policy=config.policy) as files:
        card = model_card(config.run, config.repository, config.step, policy=config.policy)
        uploads: dict[str, Any] = {file.name: file for file in files} | {CARD: card.encode()}
        report(f"uploading {len(uploads)} files to {config.repository}")
        operations = [CommitOperationAdd(*upload) for upload in uploads.items()]
        hub = HfApi()
        try:
            address = hub.create_repo(config.repository, private=not config.public, exist_ok=True)
            if not config.public and not hub.model_info(config.repository).private:
                raise ValueError(f"{config.repository} is a public repository: give --public")
            message = f"Upload {config.run.resolve().name} with sparrow"
            hub.create_commit(config.repository, operations=operations, commit_message=message)
        except (HfHubHTTPError, HFValidationError) as error:
            raise ValueError(f"{config.repository}: the hub refused it: {error}") from error
    return str(address)


@contextmanager
def model_files(
    folder: Path, step: int | None, report: Report, *, policy: str | None = None
) -> Iterator[list[Path]]:
    """Yield the files of a model folder, of a model of a run, or of a checkpoint."""
    with TemporaryDirectory() as scratch:
        model = folder if (folder / CONFIG).is_file() else folder / MODEL
        if step is not None:
            place: dict[str, Any] = {"dtype": "float32", "device": "cpu", "report": report}
            trained = load_policy(folder, step, policy=policy, **place)
            model = save(trained, Path(scratch) / MODEL)
        elif policy is not None or policy_folders(folder):
            model = policy_folder(folder, policy)
        elif not (model / CONFIG).is_file():
            steps = ", ".join(map(str, Checkpoints(folder / CHECKPOINTS, 1).steps())) or "none"
            raise ValueError(
                f"{folder} holds no model, and no run that has ended; to push a checkpoint give "
                f"--step (checkpoints: {steps})"
            )
        if has_sums(model):
            verify(model, read_sums(model))
        yield sorted(file for file in model.iterdir() if file.is_file())


# The card. It names no path of this machine: models and rows by their last part.


def model_card(
    folder: Path, repository: str, step: int | None, *, policy: str | None = None
) -> str:
    """A README with YAML front matter; what the run measured, where the folder is one of a run."""
    run = read_run(folder) if (folder / METRICS).is_file() else None
    run = run if run is None or policy is None else run.policies.get(policy, run)
    base = None if run is None else run.settings.model
    tags = ["library_name: transformers", "tags:", "- reinforcement-learning", "- sparrow"]
    if base is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        tags.append(f"base_model: {base}")
    title = repository.rpartition("/")[2]
    lines = ["---", *tags, "---", "", f"# {title}", ""]
    return "\n".join([*lines, *([] if run is None else _training(run, step))]) + "\n"


def _training(run: RunFolder, step: int | None) -> list[str]:
    settings = run.settings
    taken = len(run.steps) if step is None else step
    model = Path(settings.model or "A model").name
    rows = Path(str(settings.given.get("data.rows") or settings.given.get("data.task"))).name
    rollouts = "dense rollouts" if run.dense else "sparse-attention rollouts"
    table = [f"| {key} | {settings.given[key]} |" for key in SETTINGS if key in settings.given]
    held_out = [point for point in run.held_out() if point.step <= taken]
    return [
        f"{model}, {taken} steps of RL on {rows} with {rollouts}; sparrow {__version__}.",
        *("", "| setting | value |", "|---|---|", *table),
        *(["", "| steps | held-out accuracy |", "|---|---|"] if held_out else []),
        *(f"| {point.step} | {point} |" for point in held_out),
    ]
