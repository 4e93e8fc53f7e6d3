"""Calibrations of the shipped tiny model: what is measured is what the definitions say."""

import inspect
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.replays import replay

from sparrow import load
from sparrow.calibration import calibration
from sparrow.calibration.calibration import Collector
from sparrow.calibration.replay import DENSE, Prompt, make_arm, make_variant, teacher_force
from sparrow.calibration.store import FILE, Trajectories
from sparrow.dataflow import prompts
from sparrow.dataflow.calibrate import calibrate
from sparrow.files import FolderLock, read_lines
from sparrow.gate.budgets import MOST_BINS
from sparrow.models import Decoder
from sparrow.schema.calibrate import CalibrateConfig
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.schema.surface import LayerLoss, Surface
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.library import block_mean

SHORT = {"samples": 1, "max_tokens": 60, "seed": 0, "first_round": 2}


def config(folder: Path | None = None, **changes: Any) -> CalibrateConfig:
    given: dict[str, Any] = {"model": "tiny", "task": "assignments", "budget": (48, 80), "bin": 64}
    given |= {"first_round": 2, "layer_groups": 0, "by_layer": False, "out": folder}
    given |= {"samples": 2, "max_tokens": 100, "seed": 3}
    return CalibrateConfig(**given | changes)


def much(folder: Path) -> CalibrateConfig:
    return config(folder, layer_groups=2, by_layer=True)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def source(model: Decoder) -> prompts.PromptSet:
    return prompts.of_task(model, "assignments", length=200, count=4)


@pytest.fixture(scope="module")
def whole(model: Decoder, source: prompts.PromptSet, tmp_path_factory: Any) -> tuple[Surface, Path]:
    place = tmp_path_factory.mktemp("whole")
    return calibrate(model, source, much(place)), place


def first_of(source: prompts.PromptSet) -> prompts.PromptSet:
    return replace(source, digest="x", prompts=source.prompts[:1])


def collector(model: Decoder, source: prompts.PromptSet, place: Path) -> Collector:
    return Collector(model, source.prompts, source.mode, config(), Trajectories(place, {}))


def test_generated_acceptance_is_that_of_a_replay(
    model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    """The engine's hidden states against a second sparse pass over what it wrote."""
    made = collector(model, source, tmp_path)
    own = make_arm(make_variant(block_mean, "block_mean", model.spec), block_mean, 64)
    made.collect({own: 2, DENSE: 1})
    found = list(made.store.of(own.key))
    assert [(one.prompt, one.sample) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for one in found:
        ids, start = one.ids.tolist(), one.prompt_tokens
        assert tuple(ids[:start]) == source.prompts[one.prompt].ids
        again = replay(model, ids[:start], ids[start:], own.schedule)
        np.testing.assert_allclose(one.alpha, again.alpha[1:], atol=2e-4)
        np.testing.assert_allclose(one.entropy, again.entropy[1:], atol=2e-4)
        assert one.lengths.tolist() == again.lengths[1:].tolist()
        assert ((one.ratio >= 0) & (one.ratio <= 1)).all()
    assert min(one.alpha.min() for one in found) < 0.9  # 64 of about 200 tokens: it strays
    dense = list(made.store.of(DENSE.key))
    assert len(dense) == 2
    assert all(one.alpha.min() > 1 - 1e-3 for one in dense)
    # A round that was cut short decides nothing: answers that end first are the short ones.
    assert set(made.tokens(own, source.prompts[1:3]).prompt) == {1}


def test_budgets_by_layer_that_round_to_even_ones_are_not_measured_again(
    model: Decoder, source: prompts.PromptSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, names in ((1.05, []), (1.5, ["block-mean, by layer"])):
        monkeypatch.setattr(calibration, "shares", lambda *_, share=share: (1.0, share, 1.0, 1.0))
        own, sizes = collector(model, source, tmp_path), {"budgets": (48, 80), "edges": (0, 64)}
        made = calibration.Calibration(own, config(), **sizes, targets=(0.8,))
        even = make_variant(block_mean, "block_mean", model.spec)
        loss = {"variant": even.name, "budget": 48, "layers": (2, 3), "p05": 0.5, "low": 0.4}
        loss |= {"high": 0.6, "mean": 0.9, "tokens": 9, "prompts": 3}
        made.findings.layers.append(LayerLoss(**loss))
        suggested = [variant.name for variant in made._suggested(even)]
        assert suggested == [*names, "block-mean, dense 2,3"]


def test_an_answer_of_one_token_shows_nothing_and_is_kept(
    model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    few = config(samples=1, max_tokens=2)
    made = Collector(model, source.prompts[:1], "generated", few, Trajectories(tmp_path, {}))
    eos = replace(model.spec, eos_ids=tuple(range(model.spec.vocabulary)))
    spec, model.spec = model.spec, eos  # whatever is drawn first ends the answer
    try:
        made.collect({DENSE: 1})
    finally:
        model.spec = spec
    (only,) = made.store.of(DENSE.key)
    assert len(only.alpha) == 0
    assert len(only.ids) == only.prompt_tokens + 1


def test_forced_acceptance_is_that_of_a_replay(model: Decoder, source: prompts.PromptSet) -> None:
    ids = torch.randint(40, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    own = make_arm(make_variant(block_mean, "block_mean", model.spec), block_mean, 64)
    given = Prompt(number=5, name="given", ids=tuple(ids), start=20)
    ((_, found), (_, floor)) = teacher_force(model, given, [own, DENSE])
    again = replay(model, ids[:20], ids[20:], own.schedule)
    np.testing.assert_allclose(found.alpha, again.alpha[1:], atol=1e-5)
    assert (found.first, found.prompt_tokens, found.ratio) == (21, 20, None)
    assert floor.alpha.min() > 1 - 1e-4
    for start in (0, 149, 150):
        outside = Prompt(number=0, name="given", ids=(50,) * 150, start=start)
        with pytest.raises(ValueError, match="150 tokens"):
            list(teacher_force(model, outside, [DENSE]))


def test_a_surface_has_everything(whole: tuple[Surface, Path], model: Decoder) -> None:
    surface, place = whole
    assert Surface.load(place / "surface.json") == surface
    names = ["block-mean", "block-mean, by layer", "block-mean, dense 2,3"]
    assert [one.name for one in surface.variants] == names  # the last two layers lose the most
    assert len(surface.variants[1].shares) == model.spec.layers
    assert {(c.variant, c.budget) for c in surface.cells} == {
        (one.name, budget) for one in surface.variants for budget in (48, 80)
    }
    for one in surface.cells:
        assert one.p01 <= one.p05 <= one.p50
        assert one.estimators.lower_p05 <= one.p05 <= one.estimators.upper_p05
    assert [one.layers for one in surface.layers] == [(0, 1), (2, 3)]
    assert min(one.p05 for one in surface.floor) > 0.999
    assert any("fewer than 48 prompts" in text for text in surface.warnings)
    assert surface.undecided  # four prompts decide nothing
    assert len(surface.lengths) == 8
    tokens = {cell.start: cell.tokens for cell in surface.of("block-mean", 80)}
    positions = [c for c in surface.positions if (c.variant, c.budget) == ("block-mean", 80)]
    assert sum(tokens.values()) == sum(cell.tokens for cell in positions)
    assert min(cell.start for cell in positions) == 0


def test_interrupted_and_resumed_it_comes_to_the_same(
    whole: tuple[Surface, Path], model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, source, config(tmp_path), progress=stop)
    again = calibrate(model, source, config(tmp_path))
    assert again.cells == tuple(c for c in whole[0].cells if c.variant == "block-mean")
    # Started again after its end it measures nothing and says the same.
    measured: list[int] = []
    last = calibrate(model, source, much(whole[1]), progress=lambda *_: measured.append(1))
    same = ("cells", "layers", "floor")
    assert [getattr(last, name) for name in same] == [getattr(whole[0], name) for name in same]
    assert not measured


def test_other_prompts_in_the_same_folder_are_kept_apart(model: Decoder, tmp_path: Path) -> None:
    for skip in (0, 100):
        few = prompts.of_task(model, "assignments", length=200, count=2, skip=skip)
        found = calibrate(model, few, config(tmp_path, **SHORT | {"budget": (64,)}))
        assert max(cell.prompts for cell in (*found.cells, *found.floor)) == 2


def test_variants_by_dense_layers_and_sequences_without_a_bite(
    model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    few = first_of(source)
    changes = {"budget": (512,), "max_tokens": 30, "layer_groups": 2, "by_layer": True}
    changes |= {"dense_layers": ((), (0, 1))}
    found = calibrate(model, few, config(tmp_path, **SHORT | changes))
    assert [one.name for one in found.variants] == ["block-mean", "block-mean, dense 0,1"]
    assert found.layers == ()
    assert any("budget of 512" in text for text in found.warnings)
    with pytest.raises(ValueError, match="layers"):
        calibrate(model, few, config(tmp_path / "b", dense_layers=((9,),)))


def test_other_settings_and_tokenizers_in_the_same_folder_are_refused(
    whole: tuple[Surface, Path], model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    assert model.source is not None
    copy = shutil.copytree(model.source, tmp_path / "tiny")
    (copy / "SHA256SUMS").unlink()
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    other = load(copy, dtype="float32", device="cpu")
    for told, one, seed in (("seed", model, 4), ("tokenizer", other, 3)):
        with pytest.raises(ValueError, match=told):
            calibrate(one, source, config(whole[1], seed=seed))


def test_a_schedule_is_checked(model: Decoder, source: prompts.PromptSet, tmp_path: Path) -> None:
    layers = (LayerBudgets(layer=0, budgets=[64, 64]),)
    bins = {"lengths": [0, 100], "budgets": [48, 96], "layers": layers}
    schedule = Schedule(name="mine", **bins, dense_layers=())
    found = calibrate(model, source, config(tmp_path, budget=()), schedule=schedule)
    assert {(cell.variant, cell.budget) for cell in found.cells} == {("mine", None)}
    assert max(cell.prompts for cell in found.cells) == 4
    # The same tokens by hand.
    about, *rows = read_lines(tmp_path / FILE)
    (key,) = {row["key"]["arm"] for row in rows} - {"dense"}
    one = next(Trajectories(tmp_path, about["figures"]).of(key))
    ids, start = one.ids.tolist(), one.prompt_tokens
    again = replay(model, ids[:start], ids[start:], schedule)
    np.testing.assert_allclose(one.alpha, again.alpha[1:], atol=2e-4)


def test_two_in_one_folder_are_refused(
    model: Decoder, source: prompts.PromptSet, tmp_path: Path
) -> None:
    """Before anything is read or written there; leftovers of a killed one go."""
    lock = FolderLock(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*--out"):
        calibrate(model, source, config(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    lock.close()
    left = tmp_path / ".surface.json.4194305.unfinished"  # of no process that can run
    left.touch()
    calibrate(model, first_of(source), config(tmp_path, **SHORT | {"budget": (48,)}))
    assert not left.exists()


def test_every_schedule_of_the_gate_fits_into_the_engines_table() -> None:
    assert inspect.signature(BudgetTable).parameters["bins"].default == MOST_BINS
