"""A whole warm-up, small: stopped and resumed, refused, ended, begun with another model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import configs
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow import models
from sparrow.dataflow.checkpoints import read_state
from sparrow.files import FolderLock, parse_line
from sparrow.schema.loading import load_config
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import encode
from sparrow_recipes.warmup import documents, training
from sparrow_recipes.warmup.config import WarmupConfig
from sparrow_recipes.warmup.training import new_trainer, spec_of, warm_up

STEPS = 7
SHAPE = {"layers": 1, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1}
TOML = configs.toml(
    model={"name": "mini", **SHAPE, "head_size": 16, "max_positions": 1024},
    data={"assignments": 0.0},
    stages=[{"steps": n, "tokens": 1024, "longest": most} for n, most in ((4, 120), (3, 200))],
    optimiser={"rate": 5e-3, "warm_up": 2, "decay": 3},
    run={"device": "cpu", "save_every": 3},
)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "mini.toml"
    file.write_text(TOML, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run from beginning to end."""
    file = tmp_path_factory.mktemp("whole") / "mini.toml"
    file.write_text(TOML, encoding="utf-8")
    place = warm_up(config_of(file))
    return place.parent


def config_of(toml: Path, name: str = "run", *overrides: str) -> WarmupConfig:
    where = f"--run.out={toml.parent / name}"
    return load_config(WarmupConfig, [toml], [where, *overrides])


def curve(folder: Path) -> list[dict[str, Any]]:
    """Without times, which differ from run to run."""
    lines = (folder / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    plain = [parse_line(line) for line in lines]
    assert all(line.pop("seconds") > 0 for line in plain)
    return plain


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = (load_file(place / "model" / "model.safetensors") for place in (left, right))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    mine, other = (read_state(checkpoint(place))["model"] for place in (left, right))
    assert all(torch.equal(mine[name], other[name]) for name in other)


def checkpoint(folder: Path) -> Path:
    """The only one of a run directory."""
    (place,) = (folder / "checkpoints").iterdir()
    return place


def test_a_run_leaves_its_curve_and_a_model_and_is_not_run_again(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off between the last checkpoint and the model, it only saves that."""
    seen: list[dict[str, Any]] = []
    config, folder = config_of(toml), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training, "save", lambda *_, **__: None)
        warm_up(config, on_step=seen.append)
    assert not (folder / "model").exists()
    assert warm_up(config, on_step=pytest.fail) == folder / "model"
    lines = curve(folder)
    assert [line["step"] for line in lines] == [line["step"] for line in seen] == [*range(STEPS)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["rate"] == 2.5e-3
    assert lines[-1]["rate"] == pytest.approx(0.02 * 5e-3)
    assert all(0 < line["learnt"] < line["tokens"] <= 1024 for line in lines)
    assert load_config(WarmupConfig, [folder / "config.resolved.toml"]) == config
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(training, "new_trainer", None)
    assert warm_up(config) == folder / "model"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files


def test_stopped_and_resumed_is_the_same_run(toml: Path, tmp_path: Path, whole: Path) -> None:
    """Inside a stage, at a checkpoint, between stages; bit for bit. Where it runs may change."""
    for until in (1, 3, 4, 6):
        name = f"until {until}"
        assert warm_up(config_of(toml, name), until=until) is None
        assert len(curve(tmp_path / name)) == until
        assert not (tmp_path / name / "model").exists()
        again = config_of(toml, name, *(["--run.save_every=100"] if until == 1 else []))
        assert warm_up(again, until=100) == tmp_path / name / "model"  # beyond the end
        assert curve(tmp_path / name) == curve(whole)
        assert_same_weights(tmp_path / name, whole)


def test_broken_off_between_checkpoints_it_goes_on_from_the_last(
    toml: Path, tmp_path: Path, whole: Path
) -> None:
    """The curve has lines that the checkpoint does not know; they are cut and written again."""

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise KeyboardInterrupt

    config = config_of(toml, "broken")
    with pytest.raises(KeyboardInterrupt):
        warm_up(config, on_step=stop)
    assert read_state(checkpoint(tmp_path / "broken"))["next"] == 3
    assert len(curve(tmp_path / "broken")) > 3
    warm_up(config)
    assert curve(tmp_path / "broken") == curve(whole)
    assert_same_weights(tmp_path / "broken", whole)


def test_a_directory_of_another_configuration_is_refused(toml: Path, whole: Path) -> None:
    resolved = (whole / "config.resolved.toml").read_text(encoding="utf-8")
    for change in ("--optimiser.rate=0.001", "--data.seed=1", "--model.seed=1"):
        where = f"--run.out={whole}"
        with pytest.raises(ValueError, match=r"run\.out"):
            warm_up(load_config(WarmupConfig, [toml], [where, change]))
    assert (whole / "config.resolved.toml").read_text(encoding="utf-8") == resolved


def test_a_loss_or_gradient_that_is_no_number_is_refused(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either has spoilt the weights: no checkpoint may be made of them."""

    def spoil_weight(trainer: Any) -> None:
        with torch.no_grad():
            trainer.model.norm.weight.fill_(float("nan"))

    def spoil_gradient(trainer: Any) -> None:
        trainer.model.norm.weight.register_hook(lambda grad: grad * float("nan"))

    for name, spoil in (("loss", spoil_weight), ("gradient", spoil_gradient)):

        def spoilt(config: WarmupConfig, *, resumed: bool, spoil: Any = spoil) -> Any:
            trainer = new_trainer(config, resumed=resumed)
            spoil(trainer)
            return trainer

        monkeypatch.setattr(training, "new_trainer", spoilt)
        with pytest.raises(ValueError, match=name):
            warm_up(config_of(toml, name))
        assert not (tmp_path / name / "checkpoints").exists()
        assert not (tmp_path / name / "model").exists()


def test_begins_with_a_wider_model(toml: Path, tmp_path: Path, whole: Path) -> None:
    """One that cannot be narrowed is refused. A resumed run does not need its start."""
    start = tmp_path / "start"
    shutil.copytree(whole / "model", start)
    wide = load_file(start / "model.safetensors")
    changes = (f"--model.start={start}", "--model.intermediate=24", "--model.max_positions=512")
    config = config_of(toml, "narrow", *changes)
    state = models.hf_views(new_trainer(config).model)
    for name, weight in wide.items():
        if "mlp" in name:
            assert 24 in state[name].shape
        else:
            assert torch.equal(state[name], weight.float()), name
    for field, change in (("intermediate=65", "intermediate=65"), ("layers=2", "layers=2")):
        with pytest.raises(ValueError, match=field):
            warm_up(config_of(toml, field, changes[0], f"--model.{change}"))
    assert warm_up(config, until=3) is None
    shutil.rmtree(start)
    place = warm_up(config)
    spec = models.load(place, device="cpu").spec
    assert (spec.intermediate, spec.max_positions) == (24, 512)
    assert curve(tmp_path / "narrow")[0]["loss"] < curve(whole)[0]["loss"]


def test_the_model_folder_is_one_of_transformers(toml: Path, whole: Path) -> None:
    """How folders are written and read is tested with the models; this is of its tokenizer."""
    place = whole / "model"
    text = PUZZLES["graph"].row(0, 100).prompt
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text)) == text
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert theirs.config.eos_token_id == tokenizer.eos_token_id
    assert models.load(place, device="cpu").spec == spec_of(config_of(toml).model)


def test_damaged_files_are_named(toml: Path, tmp_path: Path) -> None:
    """Of the checkpoint, and a curve with a changed line or without steps that are behind it."""
    config = config_of(toml)
    warm_up(config, until=3)
    files = [*checkpoint(tmp_path / "run").iterdir(), tmp_path / "run" / "curve.jsonl"]
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        one_bit = bytearray(whole)
        one_bit[len(whole) // 2] ^= 1
        for content in (whole[: len(whole) // 2], b"", bytes(range(256)) * 4, bytes(one_bit), None):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(ValueError, match=file.name):
                warm_up(config)
            file.write_bytes(whole)
    assert warm_up(config, until=4) is None


def test_folders_of_others(toml: Path, tmp_path: Path) -> None:
    """Of another process, of a model that nobody knows, or none at all."""
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run\b"):
        warm_up(config_of(toml))
    lock.close()
    left = tmp_path / "run" / ".curve.jsonl.4194305.unfinished"  # beyond any process
    left.touch()
    warm_up(config_of(toml), until=1)
    assert not left.exists()
    (tmp_path / "other" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoint"):
        warm_up(config_of(toml, "other"))
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match="taken"):
        warm_up(config_of(toml, "taken"))


def test_what_cannot_run_is_found_at_the_start(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape that no machine holds, a stage that cannot be filled."""
    large = [f"--model.{key}=65536" for key in ("hidden", "intermediate")]
    with pytest.raises(ValueError, match=r"^model: "):
        warm_up(config_of(toml, "run", *large, "--model.layers=1024"))
    monkeypatch.setattr(documents, "TRIES", 5)
    text = TOML.replace("longest = 200", "shortest = 4000\nlongest = 4000")
    toml.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="4000"):
        warm_up(config_of(toml))
    assert not (tmp_path / "run").exists()
