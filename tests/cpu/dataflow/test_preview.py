"""The plan of a run: recipes as they ship, figures by hand, what is refused."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sparrow.calibration.planning.hardware import Hardware
from sparrow.cli.train import policy_sections, preview_sections, show_preview
from sparrow.dataflow import preview as module
from sparrow.dataflow.preview import (
    UTILISATION,
    PoliciesPreview,
    Preview,
    find_machine,
    find_spec,
    preview,
    preview_policies,
)
from sparrow.models.lora import Adapter, AdapterBank, bank_size, module_sizes
from sparrow.models.spec import shape
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.loading import load_config, shipped_configs
from sparrow.schema.train import TrainConfig
from sparrow.sparse import preset
from sparrow.training.costs import forward_flops, training_flops

ROOT = Path(__file__).parents[3]
RECIPES = list(shipped_configs("train"))
GIB = 2**30
DOWNLOADED = module._downloaded


@pytest.fixture(autouse=True)
def _at_the_root_without_a_gpu_or_downloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "_downloaded", lambda name: None)
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path))


def config(**sections: dict[str, Any]) -> TrainConfig:
    """A run of Qwen3-1.7B for a GPU, dense, of four long answers; sections change it."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "Qwen/Qwen3-1.7B", "device": "cuda"},
        "data": {"file": "absent.parquet", "reward": "math"},
        "rollout": {"prompts": 2, "samples": 2, "max_tokens": 8000, "max_prompt": 192},
        "run": {"steps": 3},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return TrainConfig.model_validate(base)


def said(found: Preview) -> str:
    shown = io.StringIO()
    show_preview(found, Console(width=200, file=shown))
    return shown.getvalue()


def test_a_reference_model_is_counted() -> None:
    """In 16 bits, as the policy computes: two bytes a weight that stay, and one more pass."""
    without, with_kl = preview(config()), preview(config(algorithm={"kl": 0.1}))
    assert with_kl.trainer.reference == 2 * with_kl.parameters
    assert with_kl.trainer.resident - without.trainer.resident == 2 * with_kl.parameters
    assert with_kl.trainer.total - without.trainer.total == 2 * with_kl.parameters
    assert "reference model" in said(with_kl)
    assert "reference model" not in said(without)
    other = preview(config(algorithm={"kl": 0.1, "reference": "Qwen/Qwen3-0.6B"}))
    assert other.trainer.reference == 2 * shape("qwen3-0.6b").parameters()
    for before, after in zip(without.cases, with_kl.cases, strict=True):
        assert after.seconds["log-probs"] == pytest.approx(2 * before.seconds["log-probs"])


def test_an_adapter_takes_the_place_of_gradients_and_moments() -> None:
    whole, lora = preview(config()), preview(config(model={"lora": {"rank": 16}}))
    sizes = module_sizes(shape("qwen3-1.7b"))
    numbers = 28 * 16 * sum(inputs + outputs for inputs, outputs in sizes.values())
    assert lora.trainer.moments == 8 * numbers
    assert lora.trainer.weights == 4 * whole.parameters + 4 * numbers  # bf16, and merged
    assert lora.trainer.total < whole.trainer.total / 1.5


def test_distillation_takes_a_share_of_learning() -> None:
    sparse = {"attention": {"schedule": "qwen3-1.7b-0.80"}}
    distill = {"distill": {"rank": 16, "share": 0.5}}
    plain, distilled = (preview(config(rollout=own)) for own in (sparse, sparse | distill))
    assert "distillation" in said(distilled)
    assert "distillation" not in said(plain)
    for before, after in zip(plain.cases, distilled.cases, strict=True):
        learning = before.seconds["log-probs"] + before.seconds["update"]
        assert 0.3 * learning < after.seconds["distillation"] < 0.45 * learning
        more = after.seconds["step"] - before.seconds["step"]
        assert more == pytest.approx(after.seconds["distillation"])


def test_an_asynchronous_loop_overlaps_its_sides() -> None:
    turns = preview(config())
    loop = {"run": {"loop": "async", "steps": 3}}
    found = preview(config(**loop))
    assert found.words["loop"] == "asynchronous, staleness 1"
    for before, after in zip(turns.cases, found.cases, strict=True):
        assert before.overlap is None
        assert after.overlap is not None
        sides = after.overlap.rollout, after.overlap.learning
        assert sum(sides) == pytest.approx(after.seconds["step"])
        assert after.step == after.overlap.step == max(sides)
        assert after.overlap.idle == pytest.approx(max(sides) - min(sides))
        assert after.overlap.waits == ("rollout" if sides[0] < sides[1] else "learner")
    shown = said(found)
    assert "the learner waits" in shown  # few long answers: decoding takes most of the time
    assert "overlapped" in shown
    assert "overlapped" not in said(turns)
    assert any("sparrow simulate" in note for note in found.notes)
    assert from_dict(Preview, json.loads(json.dumps(to_dict(found)))) == found
    assert (turns.sleeps, found.sleeps) == (True, False)  # both are there at the same time
    assert found.rollout_bytes >= turns.rollout_bytes


def test_workers_of_other_machines_are_named() -> None:
    dispatch = {"listen": "10.0.0.1:7777", "workers": 0}
    found = preview(config(run={"loop": "async", "steps": 3}, dispatch=dispatch))
    text = "no rollout process here; workers of other machines: sparrow worker --connect "
    assert f"{text}http://10.0.0.1:7777" in found.notes
    more = preview(config(run={"loop": "async", "steps": 3}, dispatch={"workers": 2}))
    assert any(note.startswith("2 rollout processes") for note in more.notes)


def test_without_staleness_nothing_overlaps() -> None:
    found = preview(config(run={"loop": "async", "steps": 3}, dispatch={"staleness": 0}))
    assert [case.overlap for case in found.cases] == [None, None]
    assert any("take turns" in note for note in found.notes)
    more = preview(config(run={"loop": "async"}, dispatch={"replay": 0.25}))
    assert any("not counted" in note for note in more.notes)


# Recipes.


def test_every_recipe_can_be_previewed() -> None:
    """Without the model of the hub, without its data, without a GPU."""
    for recipe in RECIPES:
        loaded = load_config(TrainConfig, [recipe])
        found = preview(loaded)
        assert found.fits, recipe
        assert bool(found.kept) == (loaded.rollout.decoding != "dense")
        assert from_dict(Preview, json.loads(json.dumps(to_dict(found)))) == found
        assert f"{found.sequences} a step" in said(found)


def test_the_recipe_of_qwen_is_planned_for_the_machine_that_it_names() -> None:
    found = preview(load_config(TrainConfig, ["qwen3-1.7b-math"]))
    assert (found.machine.name, found.machine.here) == ("h200", False)
    assert "published shape qwen3-1.7b" in found.words["model"]
    assert found.parameters == shape("qwen3-1.7b").parameters()
    assert any("no GPU" in note for note in found.notes)
    assert any("polaris-53k.parquet is not here" in note for note in found.notes)
    assert found.trainer.total < 100 * GIB  # a micro-batch of 32K tokens
    for case in found.cases:
        assert case.seconds["rollout"] < case.seconds["dense rollout"]


# Figures.


def test_batch_by_hand() -> None:
    found = preview(config(batch={"updates": 2, "tokens": 20000}))
    assert (found.sequences, found.steps) == (4, 3)
    assert found.prompt == 192  # assumed 200, but no longer one is let in
    assert found.longest == 8192
    worst, half = found.cases
    assert worst.tokens == 4 * 8192
    # Answers of 1, 2667, 5334 and 8000 tokens, in some order.
    assert half.tokens == 4 * 192 + 1 + 2667 + 5334 + 8000
    assert (worst.micro_batches, half.micro_batches) == (1, 1)
    assert preview(config(batch={"tokens": 8192})).cases[0].micro_batches == 4


def test_a_step_of_a_million_answers_is_planned_from_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of fewer where answers are long and run one at a time."""
    monkeypatch.setattr(module, "MOST_SAMPLE", 512)
    few = preview(config(rollout={"prompts": 128, "samples": 4}))
    many = preview(config(rollout={"prompts": 1024, "samples": 1024}))
    assert many.sequences == 2**20
    assert many.cases[0].tokens == 2**20 * (192 + 8000)
    assert many.cases[0].micro_batches == 2**20 // 2  # of 16384 tokens
    assert any("1048576 answers" in note for note in many.notes)
    assert not any("answers, scaled" in note for note in few.notes)
    for one, other in zip(few.cases, many.cases, strict=True):
        expected = 2**20 / 512 * one.seconds["step"]
        assert other.seconds["step"] == pytest.approx(expected, rel=0.05)
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 2**21)
    rollout = {"prompts": 64, "samples": 1024, "max_tokens": 30_000, "max_running": 1}
    found = preview(config(rollout=rollout))
    assert any(f"{2**21 // 30_000} of the" in note for note in found.notes)


def test_memory_by_hand() -> None:
    found, spec = preview(config(rollout={"kv_gib": 1.0})), shape("qwen3-1.7b")
    page = 28 * 8 * 2 * 16 * 128 * 2  # layers, KV heads, K and V, tokens, channels, bytes
    assert found.engine.page_bytes == page
    assert found.engine.pages == GIB // page
    assert found.engine.weights == 2 * spec.parameters()
    assert found.rollout_bytes == 12 * spec.parameters() + found.engine.total
    assert found.update_bytes == found.trainer.total
    sparse = preview(config(rollout={"kv_gib": 1.0, "attention": {"budget": 512}}))
    assert sparse.engine.page_bytes == page + 28 * 8 * 128 * 2  # a mean key
    awake = preview(config(rollout={"sleep": False, "kv_gib": 2.0}))
    assert awake.update_bytes == awake.trainer.total + awake.engine.total == awake.rollout_bytes
    unsaid = preview(config(rollout={"sleep": False}))
    assert any("kv_gib" in note for note in unsaid.notes)
    # Nine tenths of what the trainer and its own weights leave, less logits, prompts and graphs.
    left = preview(config(rollout={"max_tokens": 32000, "prompts": 32, "samples": 8}))
    free = Hardware.load("h200").memory - 14 * spec.parameters()
    given = int(free * 0.9) - 256 * spec.vocabulary * 4 * 3 - GIB
    assert left.engine.pages == given // left.engine.page_bytes


def test_step_time_by_hand() -> None:
    spec = shape("qwen3-1.7b")
    worst, half = (case.seconds for case in preview(config()).cases)
    (kept, _) = (case.seconds for case in preview(config(batch={"recompute": False})).cases)
    rate, lengths = 989e12 * UTILISATION, [8192] * 4
    assert worst["update"] == pytest.approx(training_flops(spec, lengths) / rate)
    assert worst["log-probs"] == pytest.approx(forward_flops(spec, lengths) / rate * 3 / 4)
    assert worst["rollout"] == worst["dense rollout"]  # no schedule
    assert worst["step"] == worst["rollout"] + worst["log-probs"] + worst["update"]
    # 8000 steps of four rows at least read the weights, 3.4 GB at 3.9 TB/s.
    assert worst["rollout"] > 8000 * 3.44e9 / 3.925e12
    assert kept["update"] == pytest.approx(worst["update"] * 3 / 4)
    assert half["step"] < worst["step"]


def test_budgets_by_length() -> None:
    found = preview(config(rollout={"attention": {"schedule": "qwen3-1.7b-0.86"}}))
    schedule = preset("qwen3-1.7b-0.86")
    assert [each.length for each in found.kept] == [1525, 2859, 4192, 5525, 6859, 8192]
    assert [each.budget for each in found.kept] == [
        schedule.budget(each.length) for each in found.kept
    ]
    last = found.kept[-1]  # 2 of 28 layers keep all 8192, the others 2048
    assert (last.budget, last.kept) == (2048, (2 * 8192 + 26 * 2048) / 28)
    assert schedule.describe() in found.words["rollout"]


def test_budgets_are_shown_at_lengths_that_occur() -> None:
    """However many positions the model has: behind a prompt, and not beyond the longest answer."""
    rollout = {"max_prompt": None, "attention": {"schedule": "qwen3-1.7b-0.86"}}
    found = preview(config(rollout={**rollout, "max_tokens": 600}))
    lengths = [each.length for each in found.kept]
    assert lengths == [300, 400, 500, 600, 700, 800]
    assert (found.prompt, found.longest > 800) == (200, True)


# The model and the machine.


def test_a_model_is_found_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a revision of the hub that was downloaded before, a published shape."""
    import huggingface_hub

    spec, source = find_spec("tiny")
    (tmp_path / "config.json").write_text(Path(source).read_text())
    assert find_spec(str(tmp_path)) == (spec, str((tmp_path / "config.json").resolve()))
    assert find_spec("smollm2-135m")[0] == shape("smollm2-135m")
    cached = {("Qwen/Qwen3-1.7B", "abc"): source}

    def look(name: str, file: str, revision: str | None = None) -> str | None:
        return cached.get((name, revision))

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    monkeypatch.setattr(module, "_downloaded", DOWNLOADED)
    assert find_spec("Qwen/Qwen3-1.7B@abc")[0] == spec
    assert find_spec("Qwen/Qwen3-1.7B@v1")[0] == shape("qwen3-1.7b")


def test_models_that_are_refused(tmp_path: Path) -> None:
    for name in ("nobody/model-7b", "qwen3-1.7b", "no-such", "a/b/qwen3-1.7b"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            find_spec(name)
    copy = shutil.copytree(Path(find_spec("tiny")[1]).parent, tmp_path / "copy")
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"config\.json .*SHA256SUMS"):
        find_spec(str(copy))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            find_spec(str(tmp_path))


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU auto is this CPU; a GPU is found by its name."""
    assert find_machine("auto") == find_machine("cpu")
    assert find_machine("cuda:1").hardware == "h200"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 * GIB, 8 * GIB))
    for name, hardware in {"NVIDIA H200": "h200", "NVIDIA L4": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=name: name)
        found = find_machine("auto")
        assert (found.name, found.memory, found.hardware) == (name, 7 * GIB, hardware)
        assert found.here
    with pytest.raises(ValueError, match="cuda:3"):
        find_machine("cuda:3")


# What does not go.


def test_what_could_never_run_is_refused() -> None:
    """A schedule for another family (unless forced), no room, unknown parts."""
    model, attention = {"name": "smollm2-135m"}, {"schedule": "qwen3-1.7b-0.86"}
    rollout: dict[str, Any] = {"max_tokens": 4000, "attention": attention}
    with pytest.raises(ValueError, match="family 'qwen3'"):
        preview(config(model=model, rollout=rollout))
    forced = preview(
        config(model=model, rollout=rollout | {"attention": attention | {"force": True}})
    )
    assert "FORCED, made for family qwen3" in forced.words["rollout"]
    for long in ({"max_tokens": 40960}, {"max_tokens": 40900, "max_prompt": 61}):
        with pytest.raises(ValueError, match="40960"):
            preview(config(rollout=long))
    tight = preview(config(rollout={"max_tokens": 40900, "max_prompt": 60}))
    assert (tight.engine.context, tight.longest, tight.prompt) == (40960, 40960, 60)
    with pytest.raises(ValueError, match="no-such"):
        preview(config(algorithm={"corrections": ({"use": "no-such"},)}))


def test_a_small_run_on_this_cpu() -> None:
    """No time is known; prompts are counted, and may take what answers leave."""
    model, data = {"name": "tiny", "device": "cpu"}, {"task": "assignments", "length": 200}
    rollout = {"prompts": 2, "samples": 2, "max_tokens": 500}
    settings = {"model": model, "data": data, "rollout": rollout, "algorithm": {"name": "remax"}}
    found = preview(TrainConfig.model_validate(settings))
    assert (found.machine.kind, found.engine.context) == ("cpu", 8192)
    assert 43 <= found.prompt == found.longest - 500 <= 60  # words of the longest
    assert [case.seconds for case in found.cases] == [{}, {}]
    ((_, timed),) = preview_sections(found)[-1]
    assert timed.startswith("not predicted: step times are known")
    assert [note.partition(" answers")[0] for note in found.notes] == ["2 greedy"]


def test_what_does_not_fit_is_said_and_not_raised() -> None:
    found = preview(config(model={"name": "Qwen/Qwen3-14B"}))
    assert not found.fits
    assert found.engine.pages == 0
    assert found.untimed is not None
    assert "it does not fit" in said(found)


def test_a_ray_run_says_who_runs_where() -> None:
    run = {"ray": "local", "ranks": 2, "loop": "async"}
    asked = config(run=run, dispatch={"workers": 3})
    words = preview(asked).words["ray"]
    assert "2 learner (1 CPU, 1 GPU each)" in words
    assert "3 rollout (1 CPU, 1 GPU each)" in words
    assert "3 judge (1 CPU each)" in words


# Several policies.


def team(**policies: dict[str, Any]) -> TrainConfig:
    rollout = {"kv_gib": 1.0, "episode": "support.teams:apart"}
    return config(rollout={**config().rollout.model_dump(), **rollout}, policies=policies)


def test_memory_of_policies_by_hand() -> None:
    """The base once, in the engine that adapters share; weights of one's own with an engine."""
    small, base = shape("qwen3-0.6b"), shape("qwen3-1.7b")
    found = preview_policies(
        team(
            solver={"lora": {"rank": 32}},
            verifier={"lora": {"rank": 16}},
            proposer={"model": "Qwen/Qwen3-0.6B"},
            opponent={"frozen": True},
        )
    )
    solver, verifier, proposer, opponent = found.policies
    numbers = 28 * 32 * sum(map(sum, module_sizes(base).values()))
    assert solver.trainer is not None
    assert verifier.trainer is not None
    assert proposer.trainer is not None
    assert (solver.trainer.weights, solver.trainer.moments) == (4 * numbers, 8 * numbers)
    assert verifier.trainer.moments == 4 * numbers
    assert proposer.trainer.resident == 12 * small.parameters()
    assert opponent.trainer is solver.engine is verifier.engine is opponent.engine is None
    assert found.shared is not None
    assert proposer.engine is not None
    assert found.shared.weights == 2 * base.parameters()
    assert proposer.engine.weights == 2 * small.parameters()
    held = found.shared.total + found.adapters + proposer.engine.total
    held += sum(p.trainer.resident for p in found.policies if p.trainer is not None)
    assert found.held == held
    passing = [p.trainer.total - p.trainer.resident for p in found.policies if p.trainer]
    assert found.peak == held + max(*passing, 2 * 2 * base.parameters())
    assert found.fits
    alone = preview_policies(team(solver={"lora": {"rank": 32}}))
    assert alone.adapters < found.adapters
    assert from_dict(PoliciesPreview, to_dict(found)) == found


def test_learners_in_processes_of_their_own_have_the_base_each_and_learn_at_once() -> None:
    chosen = team(solver={"lora": {"rank": 32}}, verifier={"lora": {"rank": 16}})
    one = preview_policies(chosen)
    other = preview_policies(chosen.replace(run=chosen.run.replace(loop="async")))
    base = 2 * shape("qwen3-1.7b").parameters()
    assert other.held == one.held + 2 * base
    passing = [p.trainer.total - p.trainer.resident for p in other.policies if p.trainer]
    assert other.peak == other.held + max(sum(passing), 2 * base)


def test_what_each_policy_does_is_said() -> None:
    found = preview_policies(
        team(
            solver={"lora": {"rank": 8}, "rollout": {"attention": {"budget": 512}}},
            verifier={"lora": {"rank": 8}, "prompts": 4, "team": 0.5},
            opponent={"frozen": True},
        )
    )
    said = dict(line for section in policy_sections(found) for line in section)
    assert "every 2 groups" in said["policy solver"]
    assert "every 4 groups, team 0.5" in said["policy verifier"]
    assert "frozen" in said["policy opponent"]
    assert said["time of a round"].startswith("not predicted")
    assert found.policies[0].kept
    assert not found.policies[1].kept


def test_policies_that_cannot_run_or_do_not_fit() -> None:
    policies, own = {"a": {"lora": {"rank": 4}}}, {"episode": "support.teams:apart"}
    with pytest.raises(ValueError, match="kv_gib"):
        preview_policies(config(rollout=own, policies=policies))
    assert not preview_policies(team(**{f"p{n}": {} for n in range(9)})).fits


def test_room_for_adapters_is_that_of_the_engine() -> None:
    spec = replace(shape("qwen3-0.6b"), layers=2)
    bank = AdapterBank(spec, 3, 4, torch.float32, "cpu")
    bank.put("a", Adapter.random(spec, 2, seed=0, dtype=torch.float32, device="cpu"))
    held = sum(stack.numel() for stacks in bank._stacks.values() for stack in stacks)
    assert bank_size(spec, 3, 4) == held
