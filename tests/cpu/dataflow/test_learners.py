"""Both learner sides, ours and that of plain transformers, by the same tests on `tiny`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import SPARSE, Hears, config, engine_of, metrics, noisy, trained, weights_of

from sparrow import load, models
from sparrow.dataflow.evaluation import load_policy
from sparrow.dataflow.local.learner import LearnerSide
from sparrow.dataflow.local.loop import replay, step
from sparrow.dataflow.local.messages import LearnerBatch, RolloutBatch
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.local.transformers_learner import TransformersLearner
from sparrow.engine.answer import ResolvedDecoding
from sparrow.models import hf_views
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import WORDS, Example, Verdict, puzzle_tokenizer
from sparrow.training.objectives.surrogates import Surrogate, Terms, ppo
from sparrow.training.world import World

KINDS: dict[str, type] = {"sparrow": LearnerSide, "transformers": TransformersLearner}
TINY = Path("tiny")
SHORT = {"max_tokens": 24, "samples": 3, "attention": SPARSE}
Played = tuple[RolloutBatch, ResolvedDecoding]


def of(folder: Path, learner: str, model: Path = TINY, **changes: Any) -> TrainConfig:
    run = {"steps": 3, "save_every": 1, "keep": 9, "learner": learner, **changes.pop("run", {})}
    sections = {"rollout": SHORT, "optimiser": {"rate": 1e-4}, **changes}
    return config(model, folder, **sections, run=run)


@pytest.fixture(params=list(KINDS))
def learner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """A run of each learner at the same start, with two updates a step."""
    place = tmp_path_factory.mktemp("pair")
    sections = {
        "batch": {"updates": 2, "tokens": 256},
        "rollout": {**SHORT, "max_tokens": 60},
        "optimiser": {"rate": 1e-4, "clip": 0.1, "weight_decay": 0.1},
    }
    runs = [open_run(of(place / name, name, **sections), judge=noisy) for name in KINDS]
    assert [type(run.learner) for run in runs] == list(KINDS.values())
    yield runs
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def played(pair: list[Run]) -> Played:
    request = pair[0].request()
    return pair[0].rollout.generate(request), pair[0].rollout.decoding(request.schedule)


def largest_gap(ours: LearnerBatch, theirs: LearnerBatch, figure: str) -> float:
    gaps = [
        np.abs(getattr(mine, figure) - getattr(other, figure)).max()
        for mine, other in zip(ours.scores, theirs.scores, strict=True)
    ]
    return float(max(gaps))


# Of one batch.


def test_scores_weights_and_acceptance_agree(pair: list[Run], played: Played) -> None:
    ours, theirs = (run.learner.score(*played) for run in pair)
    assert largest_gap(ours, theirs, "logprob") < 1e-4
    assert largest_gap(ours, theirs, "entropy") < 1e-4
    assert len(ours.readings) == len(theirs.readings) == 4
    for mine, other in zip(ours.readings, theirs.readings, strict=True):
        np.testing.assert_allclose(mine.alpha, other.alpha, atol=1e-4)
        assert mine.lengths.tolist() == other.lengths.tolist()
    assert min(reading.alpha.min() for reading in ours.readings) < 0.9, "the actor is sparse"
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3)
    assert ours.mismatch == pytest.approx(theirs.mismatch, rel=1e-3, abs=1e-4)
    assert [sample.advantage for sample in ours.samples] == [s.advantage for s in theirs.samples]
    assert ours.groups == theirs.groups


def test_token_ids_beyond_the_vocabulary_are_named(pair: list[Run], played: Played) -> None:
    rollouts, decoding = played
    first, *others = rollouts.groups
    wrong, *answers = first.trajectories
    ids = np.append(wrong.ids[:-1], 10**6).astype(wrong.ids.dtype)
    group = first.replace(trajectories=(wrong.replace(ids=ids), *answers))
    for run in pair:
        with pytest.raises(ValueError, match=f"{first.prompt_id}.*1000000"):
            run.learner.score(rollouts.replace(groups=(group, *others)), decoding)


def test_updates_move_weights_by_the_same_amounts(pair: list[Run], played: Played) -> None:
    """AdamW makes whole steps of gradients that are rounding: of those a few differ."""
    moved, stats = [], []
    for run in pair:
        state, before = run.learner.state(), weights_of(run)
        stats.append(run.learner.update(run.learner.score(*played), played[1]))
        after = weights_of(run)
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)]))
        run.learner.restore(state)
        assert all(torch.equal(w, before[name]) for name, w in weights_of(run).items())
    assert [len(updates) for updates in stats] == [2, 2]
    for mine, other in zip(*stats, strict=True):
        for figure in ("loss", "clipped", "kl", "gradient", "rate"):
            near = pytest.approx(getattr(other, figure), rel=1e-4, abs=1e-6)
            assert getattr(mine, figure) == near, figure
    ours, theirs = moved
    assert ours.abs().mean() > 5e-5
    assert (ours - theirs).norm() < 1e-3 * ours.norm()
    assert ((ours - theirs).abs() > 1e-7).double().mean() < 1e-3


@pytest.mark.parametrize(
    ("shape", "tied"), [("llama-3.2-1b", False), ("qwen2.5-0.5b", True)], ids=["llama", "qwen2"]
)
def test_other_families_agree(shape: str, tied: bool, tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}
    made = models.random(
        shape, **sizes, head_size=16, vocabulary=len(WORDS), max_positions=256, tied=tied, seed=1
    )
    with torch.no_grad():
        for view in hf_views(made).values():
            view.add_(torch.randn(view.shape, generator=torch.Generator().manual_seed(2)) / 10)
    model = models.save(made, tmp_path / "model", tokenizer=puzzle_tokenizer())
    found = []
    for name in KINDS:
        rollout = {"max_tokens": 12, "samples": 2}
        with open_run(of(tmp_path / name, name, model, rollout=rollout), judge=noisy) as run:
            rollouts = run.rollout.generate(run.request())
            batch = run.learner.score(rollouts, run.rollout.decoding(None))
            step(run)
            found.append((batch, metrics(tmp_path / name)[0]))
    (ours, mine), (theirs, other) = found
    assert largest_gap(ours, theirs, "logprob") < 1e-4
    assert mine["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


# Whole runs.


def test_a_run_ends_with_a_model_and_its_weights_reach_the_engine(
    learner: str, tmp_path: Path
) -> None:
    import transformers

    folder, validation = tmp_path / "run", {"every": 3, "rows": 2}
    run = trained(of(folder, learner, validation=validation))
    assert (run.step, engine_of(run).version) == (3, 3)
    weights = weights_of(run)
    known = hf_views(load(folder / "model", dtype="float32", device="cpu"))
    held = hf_views(engine_of(run).model)
    stored = hf_views(load_policy(folder, "latest", dtype="float32", device="cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    for name, weight in theirs.named_parameters():
        for other in (weights, known, held, stored):
            assert torch.equal(weight, other[name]), name
    start = hf_views(load(TINY, dtype="float32", device="cpu"))
    assert not any(torch.equal(weights[name], view) for name, view in start.items())
    found = metrics(folder)
    assert [line["actor/skipped"] for line in found] == [0, 0, 0]
    assert all(line["actor/grad_norm"] > 0 for line in found)
    assert replay(folder, 2, "train")["actor/pg_loss"] == found[2]["actor/pg_loss"]


def test_metrics_of_the_first_step_agree(tmp_path: Path) -> None:
    """All but the KL of updates, which is not measured by transformers."""
    for name in KINDS:
        trained(of(tmp_path / name, name, run={"steps": 1}))
    ours, theirs = (metrics(tmp_path / name)[0] for name in KINDS)
    assert ours.keys() - theirs.keys() == {"actor/kl_new_old"}
    assert theirs == pytest.approx({name: ours[name] for name in theirs}, rel=1e-3, abs=1e-4)


def test_a_killed_run_goes_on_bit_for_bit(learner: str, tmp_path: Path) -> None:
    """From the last checkpoint, whatever was done since."""
    parts = {"batch": {"updates": 2}, "optimiser": {"rate": 1e-4, "warm_up": 9}}
    whole, killed = (of(tmp_path / name, learner, **parts) for name in ("whole", "killed"))
    trained(whole)
    with open_run(killed, judge=noisy) as run:
        step(run)
        run.config = killed.replace(run=killed.run.replace(save_every=50))
        step(run)
    trained(killed)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    for name in ("model/model.safetensors", "checkpoints/step_000003/state.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_exact_decoding(learner: str, tmp_path: Path) -> None:
    rollout = {**SHORT, "decoding": "exact", "speculative": {"draft_tokens": 3}}
    trained(of(tmp_path / "run", learner, rollout=rollout, run={"steps": 1}))
    (found,) = metrics(tmp_path / "run")
    assert found["sparse/accept_p05"] > 0.999
    assert abs(found["mismatch/k3"]) < 1e-6


# What goes wrong.


def no_number(terms: Terms) -> Surrogate:
    found = ppo(terms)
    return Surrogate(found.loss_T * torch.nan, found.clipped_T)


def test_a_loss_that_is_no_number_is_skipped(learner: str, tmp_path: Path) -> None:
    """In the second step; the third goes on with the weights of the first."""
    watch = Hears()
    with open_run(of(tmp_path / "run", learner), judge=noisy, callbacks=watch) as run:
        side: Any = run.learner
        step(run)
        before, algorithm = weights_of(run), side.algorithm
        side.algorithm = replace(algorithm, surrogate=no_number)
        step(run)
        assert all(torch.equal(w, before[name]) for name, w in weights_of(run).items())
        assert engine_of(run).version == 2
        side.algorithm = algorithm
        step(run)
        assert not any(torch.equal(w, before[name]) for name, w in weights_of(run).items())
    assert [line["actor/skipped"] for line in metrics(tmp_path / "run")] == [0, 1, 0]
    assert sum("update skipped, weights unchanged (1 in a row)" in told for told in watch.told) == 1


def test_weights_that_are_no_numbers_break_the_batch(learner: str, tmp_path: Path) -> None:
    """Nothing is learnt from it; from a state before it the run goes on."""
    with open_run(of(tmp_path / "run", learner), judge=noisy) as run:
        state, decoding = run.learner.state(), run.rollout.decoding(run.gate.schedule)
        played = run.rollout.generate(run.request())
        run.learner.weights()["model.norm.weight"].fill_(torch.nan)  # of the learner alone
        batch = run.learner.score(played, decoding)
        (stats,) = run.learner.update(batch, decoding)
        assert (batch.broken, batch.samples, stats.skipped) == (True, (), True)
        assert run.learner.state()["learner"]["taken"] == 0
        run.learner.restore(state)
        step(run)
    assert metrics(tmp_path / "run")[0]["actor/skipped"] == 0


async def equal_rewards(example: Example, text: str) -> Verdict:
    return Verdict(score=1.0, acc=1.0, reason="always right")


def test_momentum_alone_moves_no_weight(learner: str, tmp_path: Path) -> None:
    before = weights_of(trained(of(tmp_path / "run", learner, run={"steps": 1})))
    longer = of(tmp_path / "run", learner, run={"steps": 2})
    after = weights_of(trained(longer, judge=equal_rewards))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert [line["actor/no_signal_updates"] for line in metrics(tmp_path / "run")] == [0, 1]


def test_states_of_strangers_and_of_the_other_learner_are_refused(
    learner: str, tmp_path: Path
) -> None:
    with open_run(of(tmp_path / "run", learner), judge=noisy) as run:
        step(run)
        for key, value in (("weights", {}), ("taken", "many"), ("moments", None)):
            state = run.state() | {"step": 2}
            state["learner"] = {**state["learner"], key: value}
            run.ledger.checkpoints.save(2, state, run.ledger.identity)
            with pytest.raises(ValueError, match="step 2"):
                run.load_checkpoint(2)
            (tmp_path / "run" / "checkpoints" / "step_000002").rename(tmp_path / key)
    (other,) = KINDS.keys() - {learner}
    with pytest.raises(ValueError, match=rf"run\.learner {learner} -> {other}"):
        open_run(of(tmp_path / "run", other))


@pytest.mark.parametrize(
    ("told", "changes"),
    [
        ("rollout.distill", {"rollout": {**SHORT, "distill": {"rank": 2}}}),
        ("batch.attention", {"batch": {"attention": "sparse"}}),
        ("algorithm.kl", {"algorithm": {"kl": 0.1}}),
        ("gate.max_kl", {"gate": {"max_kl": 0.1}}),
    ],
)
def test_what_only_our_learner_does_is_refused(
    told: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    of(tmp_path, "sparrow", **changes)
    with pytest.raises(ValueError, match=rf"run\.learner.*sparrow with {told}"):
        of(tmp_path, "transformers", **changes)


def test_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.dataflow.local.run.join_world", lambda device: World(size=2))
    with pytest.raises(ValueError, match=r"run\.learner.*2 ranks"):
        open_run(of(tmp_path, "transformers"))
