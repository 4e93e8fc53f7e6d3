"""The training loop: what does not change at rate 0, what comes again, what it leaves behind."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import (
    SPARSE,
    Hears,
    config,
    engine_of,
    lines,
    metrics,
    trained,
    weights_of,
)

from sparrow import load
from sparrow.dataflow.checkpoints import read_state
from sparrow.dataflow.local.loop import replay
from sparrow.dataflow.run_files import read_rollouts, write_rollouts
from sparrow.models import hf_views
from sparrow.models.attention import Packed
from sparrow.schema.loading import read_resolved, save_resolved
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import Example, Verdict

GOLDEN = Path(__file__).with_name("golden_run.json")


def test_a_run_gives_the_numbers_that_it_gave_before(done: Path) -> None:
    """Up to the rounding of another CPU. Written by the commit before the sides of a run.

    The ends of the interval of p0.1, over a hundred tokens, jump with it from token to token.
    """
    found = {
        "metrics": metrics(done),
        "validation": lines(done / "validation.jsonl"),
        "actions": lines(done / "actions.jsonl"),
    }
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert found.keys() == golden.keys()
    for name, before in golden.items():
        for line, known in zip(found[name], before, strict=True):
            assert list(line) == list(known)
            kept = {key: value for key, value in line.items() if "p0_1_" not in key}
            expected = {key: known[key] for key in kept}
            assert kept == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_measuring_the_kl_of_updates_changes_nothing(model: Path, tmp_path: Path) -> None:
    runs = {}
    for count in (0, 3):
        folder = tmp_path / str(count)
        batch = {"kl_sample": count, "tokens": 256, "updates": 2}
        run = trained(config(model, folder, batch=batch, run={"steps": 2}))
        runs[count] = metrics(folder), weights_of(run)
    kls = [step.pop("actor/kl_new_old") for step in runs[3][0]]
    assert all(kl > 0 for kl in kls)
    assert runs[0][0] == runs[3][0]
    for name, weight in runs[0][1].items():
        assert torch.equal(weight, runs[3][1][name]), name


def test_dense_rollout_is_the_policy_however_often_the_engine_got_weights(
    model: Path, tmp_path: Path
) -> None:
    """With a rate, so that a stale weight in the engine would show."""
    trained(config(model, tmp_path / "run", run={"steps": 3}, rollout={"max_tokens": 16}))
    found = metrics(tmp_path / "run")
    assert len(found) == 3
    for step in found:
        assert step["actor/grad_norm"] > 0
        assert abs(step["mismatch/k3"]) < 1e-6
        assert step["sparse/accept_p05"] > 0.999
        assert step["mismatch/ratio_p01"] > 0.999


def test_exact_rollout_is_the_policy_whatever_drafts(model: Path, tmp_path: Path) -> None:
    """The gate has nothing to do, and metrics say what was drafted and accepted."""
    runs = {}
    for acceptance in ("rejection", "shared_noise"):
        rollout = {
            "max_tokens": 60,
            "decoding": "exact",
            "attention": {"budget": 64},
            "speculative": {"draft_tokens": 3, "acceptance": acceptance},
        }
        folder = tmp_path / acceptance
        trained(config(model, folder, run={"steps": 2}, rollout=rollout))
        runs[acceptance] = metrics(folder)
        assert (folder / "schedule.json").is_file()
        for step in runs[acceptance]:
            assert abs(step["mismatch/k3"]) < 1e-6
            assert step["sparse/density"] == 1
            assert step["sparse/accept_p05"] > 0.999
            assert 0 < step["spec/accepted_tokens"] <= step["spec/draft_tokens"]
            assert 1 <= step["spec/tokens_per_round"] <= 4
            assert 0 < step["spec/acceptance_by_position/3"] <= 1
    trained(config(model, tmp_path / "dense", run={"steps": 2}, rollout={"max_tokens": 60}))
    for step, dense in zip(runs["shared_noise"], metrics(tmp_path / "dense"), strict=True):
        same = {name for name in dense if not name.startswith(("timing", "perf"))}
        assert {name: step[name] for name in same} == pytest.approx({n: dense[n] for n in same})


def test_rate_0_keeps_the_mismatch_flat(model: Path, tmp_path: Path) -> None:
    """The same rows with other draws at every step, by weights that keep their bits."""
    sections = {"data": {"rows": 2}, "rollout": {"attention": SPARSE}, "gate": {"window": 1}}
    run = trained(
        config(model, tmp_path / "run", **sections, optimiser={"rate": 0.0}, run={"steps": 4})
    )
    before = hf_views(load(model, dtype="float32", device="cpu"))
    for name, weight in weights_of(run).items():
        assert torch.equal(weight, before[name]), name
    for name, weight in hf_views(engine_of(run).model).items():
        assert torch.equal(weight, before[name]), name
    found = metrics(tmp_path / "run")
    for name, near in (("mismatch/accept_estimate", 0.006), ("sparse/accept_p05", 0.02)):
        values = np.array([step[name] for step in found])
        assert np.abs(values - values.mean()).max() < near, (name, values)
        assert abs(np.polyfit(np.arange(4), values, 1)[0]) < near / 4, (name, values)
    assert {step["critic/score/mean"] for step in found} != {found[0]["critic/score/mean"]}
    assert [step["actor/lr"] for step in found] == [0.0] * 4


async def equal_rewards(example: Example, text: str) -> Verdict:
    return Verdict(score=1.0, acc=1.0, reason="always right")


def test_steps_of_equal_rewards_move_no_weight(model: Path, tmp_path: Path) -> None:
    """Two steps with noisy rewards fill Adam's moments; two more have nothing to learn from."""
    parts = {"rollout": {"max_tokens": 16}, "run": {"steps": 2}}
    before = weights_of(trained(config(model, tmp_path / "run", **parts)))
    longer = config(model, tmp_path / "run", **parts | {"run": {"steps": 4}})
    watch = Hears()
    after = weights_of(trained(longer, judge=equal_rewards, watch=watch))
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    found = [line["actor/no_signal_updates"] for line in metrics(tmp_path / "run")]
    assert found == [0, 0, 1, 1]
    assert sum("no optimiser step" in text for text in watch.told) == 2


def test_sleep_changes_nothing(model: Path, tmp_path: Path) -> None:
    runs = []
    for sleep in (True, False):
        rollout = {"attention": SPARSE, "sleep": sleep, "max_tokens": 16}
        chosen = config(model, tmp_path / str(sleep), rollout=rollout, run={"steps": 2})
        runs.append(trained(chosen))
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    mine, other = map(weights_of, runs)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert not any(torch.equal(mine[n], w) for n, w in hf_views(load(model)).items() if "mlp" in n)


def test_the_folder_at_the_end_is_the_learner_s_model_in_transformers(done: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(done / "model").float()
    ours = load(done / "model", dtype="float32", device="cpu")
    ids = torch.arange(2, 40)
    with torch.no_grad():
        hidden = ours(ids, torch.arange(38), Packed(bounds=torch.tensor([0, 38])))
        torch.testing.assert_close(
            ours.logits(hidden), theirs(ids[None]).logits[0], atol=2e-5, rtol=1e-4
        )
    state = read_state(done / "checkpoints" / "step_000003")
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, state["learner"]["weights"][name]), name
    assert transformers.AutoTokenizer.from_pretrained(done / "model").encode("x1 = 5") != []


def test_a_step_done_again_gives_the_same_tokens_and_numbers(done: Path) -> None:
    """All but what the gate sees, as hidden states are not kept.

    The judge of the configuration, which differs from the run's, changes rewards alone.
    """
    for step in (0, 2):
        found = replay(done, step, "rollout")
        assert (found["step"], found["kept"], found["same_tokens"]) == (step, 6, 6)
        before, found = metrics(done)[step], replay(done, step, "train")
        compared = [name for name in before if name.startswith(("actor/", "critic/", "mismatch/"))]
        of_rollout = ("critic/acc/played", "critic/outcome/")
        compared = [name for name in compared if not name.startswith(of_rollout)]
        assert {name: found[name] for name in compared} == {n: before[n] for n in compared}
        assert len(compared) > 20


def test_replay_says_what_is_possible(done: Path, tmp_path: Path) -> None:
    assert replay(done, None, "train")["step"] == 2
    assert replay(done, None, "rollout", out=tmp_path)["step"] == 2
    assert len(read_rollouts(tmp_path, 2)) == 2
    with pytest.raises(ValueError, match="step 7"):
        replay(done, 7, "train")
    with pytest.raises(ValueError, match=r"config\.resolved\.toml"):
        replay(tmp_path, None, "train")
    assert not (done / "rollouts" / "step_000003.jsonl").exists()


# A run directory may be anybody's.


@pytest.fixture
def given(done: Path, tmp_path: Path) -> Path:
    """A run directory, to be damaged."""
    return Path(shutil.copytree(done, tmp_path / "given"))


def write_config(folder: Path, **changes: Mapping[str, Any]) -> None:
    plain = read_resolved(TrainConfig, folder).model_dump(mode="json")
    changed = {key: {**value, **changes.get(key, {})} for key, value in plain.items()}
    save_resolved(TrainConfig.model_validate_json(json.dumps(changed)), folder)


def test_replay_imports_no_code_unless_asked(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that its configuration names would say so when it is imported."""
    (given / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(given))
    settings: dict[str, dict[str, Any]] = {
        "rollout.episode": {"rollout": {"episode": "planted:episode"}},
        "algorithm.advantage": {"algorithm": {"advantage": "planted:advantage"}},
        "algorithm.surrogate.use": {"algorithm": {"surrogate": {"use": "planted:surrogate"}}},
        "algorithm.corrections[0].use": {"algorithm": {"corrections": [{"use": "planted:tis"}]}},
    }
    original = (given / "config.resolved.toml").read_bytes()
    for key, change in settings.items():
        (given / "config.resolved.toml").write_bytes(original)
        write_config(given, **change)
        with pytest.raises(ValueError, match=re.escape(key)):
            replay(given, 0, "rollout")
        assert "planted" not in sys.modules
        with pytest.raises((ValueError, SystemExit), match="imported"):
            replay(given, 0, "rollout", allow_code=True)
        sys.modules.pop("planted", None)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no file": ("config.resolved.toml", Path.unlink),
    "a changed setting": ("config.resolved.toml", flip),
    "changed tensors": ("checkpoints/step_000002/state.safetensors", flip),
    "a changed line": ("rollouts/step_000002.jsonl", flip),
}


def test_replay_names_the_file_that_is_wrong(given: Path) -> None:
    for name, damage in FAULTS.values():
        file, whole = given / name, (given / name).read_bytes()
        damage(file)
        with pytest.raises(ValueError, match=re.escape(file.name)) as error:
            replay(given, 2, "train")
        assert str(given) in str(error.value)
        file.write_bytes(whole)
    for gone, part in (("checkpoints/step_000002", "rollout"), ("rollouts", "train")):
        shutil.rmtree(given / gone)
        with pytest.raises(ValueError, match=rf"{given}.*step 2"):
            replay(given, 2, part)


def test_replay_names_trajectories_that_the_model_cannot_read(given: Path) -> None:
    groups = read_rollouts(given, 2)
    first = groups[0].trajectories[0]
    ids = np.array(first.ids)
    ids[0] = 10**6
    changed = groups[0].replace(trajectories=(first.replace(ids=ids),))
    write_rollouts(given, 2, [changed])
    with pytest.raises(ValueError, match=r"step_000002\.jsonl"):
        replay(given, 2, "train")
