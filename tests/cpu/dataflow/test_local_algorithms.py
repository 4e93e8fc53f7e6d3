"""Every algorithm, surrogate and correction through the loop; episodes, messages and rewards."""

import asyncio
import json
import pickle
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toys import TOOL
from support.training import (
    FIRST,
    SPARSE,
    Hears,
    config,
    engine_of,
    learner_side,
    lines,
    metrics,
    model_folder,
    noisy,
    rollout_side,
    trained,
    weights_of,
)

from sparrow import load, models
from sparrow.dataflow.backend import RolloutBackend
from sparrow.dataflow.episodes import (
    Actor,
    build_trajectory,
    is_informative,
    load_episode,
    single_turn,
)
from sparrow.dataflow.language import PUZZLE_LANGUAGE
from sparrow.dataflow.local.learner_batch import credit
from sparrow.dataflow.local.messages import EpisodeFailed, RolloutRequest
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.run_files import read_rollouts
from sparrow.engine.answer import DENSE
from sparrow.models import hf_views
from sparrow.models.lora import Adapter
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.episode import Group, Trajectory, Turn
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.train import (
    AlgorithmConfig,
    BatchConfig,
    GateConfig,
    RateConfig,
    TrainConfig,
)
from sparrow.tasks.base import RIGHT, Example, Verdict, encode, wrong
from sparrow.training.objectives.algorithms import make_algorithm
from sparrow.training.world import World

SHORT = {"max_tokens": 8}
ONE = {"steps": 1}
TINY = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_size": 8}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model", chat=True)


def learnt(run: Run, model: Path) -> bool:
    """Whether weights are others than those of the start."""
    before = hf_views(load(model, dtype="float32", device="cpu"))
    return any(not torch.equal(weight, before[name]) for name, weight in weights_of(run).items())


def test_algorithms_and_surrogates(model: Path, tmp_path: Path) -> None:
    """Each algorithm learns; the second update of a step is off-policy for each surrogate."""
    surrogates = {"grpo": "gspo", "dr-grpo": "cispo", "rloo": "dppo-tv", "reinforce++": "reinforce"}
    for name in ("grpo", "dr-grpo", "dapo", "rloo", "remax", "reinforce++"):
        algorithm: dict[str, Any] = {"name": name}
        if name in surrogates:
            algorithm["surrogate"] = {"use": surrogates[name]}
        sections = {"algorithm": algorithm, "batch": {"updates": 2}, "rollout": SHORT}
        run = trained(config(model, tmp_path / name, **sections, run=ONE))
        (found,) = metrics(tmp_path / name)
        assert learnt(run, model), name
        assert found["actor/grad_norm"] > 0
        assert (found["actor/skipped"], found["actor/updates"]) == (0, 2)
        assert found["actor/ppo_kl"] > 0
        assert learner_side(run).learner.taken == 2
        (first, *_) = read_rollouts(tmp_path / name, 0)
        assert (first.baseline is not None) == (name == "remax")


def test_corrections_together_and_alone(model: Path, tmp_path: Path) -> None:
    """A veto that rejects everything leaves nothing to learn; others change the gradient.

    What the sides tell each other goes through a pipe, so that they may be processes.
    """
    rollout = {"attention": SPARSE, "max_tokens": 30, "samples": 2}
    veto: list[dict[str, Any]] = [{"use": "veto", "settings": {"least": 1.5}}]
    icepop = [{"use": "icepop", "settings": {"low": 0.99, "high": 1.01}}]
    chosen = {"none": [], "icepop": icepop, "veto": [{"use": "token-tis"}, *veto]}
    run = open_run(config(model, tmp_path / "run", rollout=rollout), judge=noisy)
    request = from_dict(RolloutRequest, json.loads(json.dumps(to_dict(run.request()))))
    assert request == run.request()
    played = pickle.loads(pickle.dumps(run.rollout.generate(request)))
    assert played == run.rollout.generate(request)
    decoding = run.rollout.decoding(request.schedule)
    state = run.learner.state()
    mismatch, gradient = {}, {}
    for name, corrections in chosen.items():
        own = config(model, tmp_path / "run", algorithm={"corrections": corrections})
        algorithm = make_algorithm(own.algorithm, max_tokens=30)
        side = replace(learner_side(run), algorithm=algorithm)
        batch = pickle.loads(pickle.dumps(side.score(played, decoding)))
        (stats,) = side.update(batch, decoding)
        assert not stats.skipped
        mismatch[name], gradient[name] = batch.mismatch, stats.gradient
        side.restore(state)
    run.close()
    assert mismatch["none"]["mismatch/ess"] == pytest.approx(1)
    assert 0 < mismatch["icepop"]["mismatch/masked"] < 1
    assert mismatch["veto"]["mismatch/rejected"] == 1
    assert gradient["veto"] == 0
    assert gradient["icepop"] != gradient["none"] > 0


async def right(example: Example, text: str) -> Verdict:
    return RIGHT


def test_the_greedy_baseline_is_shaped_as_the_answers_are(model: Path, tmp_path: Path) -> None:
    """All are right, and every token costs an eighth: 1 - 1/8 at most, and 1 only unshaped."""
    algorithm = {"name": "remax", "overlong": 8}
    chosen = config(model, tmp_path / "run", algorithm=algorithm, rollout=SHORT)
    with open_run(chosen, judge=right) as run:
        groups = run.rollout.generate(run.request()).groups
    assert {group.baseline for group in groups} <= {1 - tokens / 8 for tokens in range(1, 9)}
    samples = credit(groups, learner_side(run).algorithm, limit=8)
    for group, sample in zip(groups, samples[::4], strict=True):
        tokens = int((group.trajectories[0].weight_version >= 0).sum())
        assert sample.advantage == pytest.approx(1 - tokens / 8 - group.baseline)


def answer(reward: float, subgroup: str) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        rollout_logprob=np.array([0, -1, -1], np.float32),
        weight_version=np.array([-1, 0, 0], np.int32),
        policy_id=np.array([-1, 0, 0], np.int16),
        turns=(Turn(start=0, stop=1, role="user"), Turn(start=1, stop=3, role="assistant")),
        reward=reward,
        acc=reward,
        subgroup=subgroup,
    )


def test_answers_are_compared_with_those_of_their_subgroup() -> None:
    """Two problems of one prompt: an easy one (1, 1, 0) and a hard one (0, 0.5), interleaved."""
    rewards = [(1.0, "easy"), (0.0, "hard"), (1.0, "easy"), (0.5, "hard"), (0.0, "easy")]
    group = Group(prompt_id="p", trajectories=tuple(answer(*one) for one in rewards))
    algorithm = make_algorithm(AlgorithmConfig(name="dr-grpo"), max_tokens=8)
    found = [sample.advantage for sample in credit([group, group], algorithm, limit=8)]
    assert found == pytest.approx([1 / 3, -0.25, 1 / 3, 0.25, -2 / 3] * 2)
    same = Group(prompt_id="p", trajectories=(answer(1.0, "easy"), answer(0.0, "hard")))
    assert not is_informative(same)
    assert is_informative(group)


def right_from(position: int) -> Any:
    """Rows before a position are all right; from there on every other answer is."""
    judged = {"count": 0}

    async def judge(example: Example, text: str) -> Verdict:
        judged["count"] += 1
        early = int(example.id.split("-")[-1]) - FIRST < position
        return RIGHT if early or judged["count"] % 2 else wrong("odd")

    return judge


def test_dynamic_sampling_leaves_out_what_is_all_right_and_refills(
    model: Path, tmp_path: Path
) -> None:
    run = trained(
        config(model, tmp_path / "run", algorithm={"name": "dapo"}, rollout=SHORT, run=ONE),
        judge=right_from(3),
    )
    (found,) = metrics(tmp_path / "run")
    assert found["data/rounds"] == 3  # 2 left out, then 1 of 2, then 1
    assert found["data/uninformative_groups"] == 3
    assert found["data/groups"] == 2
    assert found["critic/acc/mean"] == 0.5
    assert found["critic/acc/played"] == 0.8, "three of five groups are all right"
    shares = [found[f"critic/outcome/{name}"] for name in ("right", "cut_off", "wrong")]
    assert shares[0] == 0.8
    assert sum(shares) == pytest.approx(1)
    assert run.ledger.position == 5
    ids = [group.prompt_id for group in read_rollouts(tmp_path / "run", 0)]
    assert ids == [f"assignments-100-{FIRST + n}" for n in (3, 4)]


def test_a_step_without_anything_to_learn_from_is_said_and_taken(
    model: Path, tmp_path: Path
) -> None:
    """The gate sees the groups that dynamic sampling leaves out all the same."""
    dapo = {"name": "dapo", "refills": 2}
    chosen = config(model, tmp_path / "run", algorithm=dapo, rollout=SHORT, run={"steps": 2})
    watch = Hears()
    run = trained(chosen, judge=right, watch=watch)
    found = metrics(tmp_path / "run")
    assert [step["actor/updates"] for step in found] == [0, 0]
    assert [step["data/groups"] for step in found] == [0, 0]
    assert [step["data/uninformative_groups"] for step in found] == [4, 4]
    assert found[0]["sparse/accept_p05"] > 0.5
    assert "critic/score/mean" not in found[0]
    assert [text.partition(":")[0] for text in watch.told] == ["step 0", "step 1"]
    assert not learnt(run, model)
    assert read_rollouts(tmp_path / "run", 0) == []
    assert (run.step, run.ledger.position, engine_of(run).version) == (2, 8, 2)


def test_two_turns_with_a_tool_between(model: Path, tmp_path: Path) -> None:
    """By import path. What the tool says is read, and is not learnt."""
    rollout = {"max_tokens": 60, "episode": "support.toys:two_turns"}
    gate = {"sample": 3, "least": 1}
    trained(config(model, tmp_path / "run", rollout=rollout, gate=gate, run=ONE))
    groups = read_rollouts(tmp_path / "run", 0)
    played = [one for group in groups for one in group.trajectories]
    for one in played:
        assert [turn.role for turn in one.turns] == ["user", "assistant", "tool", "assistant"]
        between = one.turns[2]
        assert one.ids[between.start : between.stop].tolist() == encode(TOOL)
        assert not one.loss_mask[between.start : between.stop].any()
    assert len({one.ids[one.turns[3].start :].tobytes() for one in played}) == 8, "all differ"
    (found,) = metrics(tmp_path / "run")
    assert found["sparse/accept_p05"] > 0.999, "watched over both turns"
    assert abs(found["mismatch/k3"]) < 1e-6
    assert found["response_length/mean"] <= 16


def completion(prompt: Sequence[int], answer: Sequence[int], hidden: bool = False) -> Completion:
    return Completion(
        prompt_ids=np.array(prompt),
        token_ids=np.array(answer),
        logprobs=np.full(len(answer), -1.0),
        weight_versions=np.full(len(answer), 3),
        finish_reason="stop",
        attention="dense",
        hidden=np.ones((len(answer), 2)) if hidden else None,
    )


def test_trajectories_of_turns_by_hand() -> None:
    turns = [completion([1, 2], [3], True), completion([1, 2, 3, 9, 9], [4, 5], True)]
    one = build_trajectory("row", turns, RIGHT, "text")
    assert one.ids.tolist() == [1, 2, 3, 9, 9, 4, 5]
    assert one.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert one.weight_version.tolist() == [-1, -1, 3, -1, -1, 3, 3]
    assert one.policy_id.tolist() == [-1, -1, 0, -1, -1, 0, 0]
    assert one.rollout_logprob.tolist() == [0, 0, -1, 0, 0, -1, -1]
    assert one.hidden is not None
    assert one.hidden.shape == (3, 2)
    at_once = [turns[0], completion([1, 2, 3], [4])]
    roles = [turn.role for turn in build_trajectory("row", at_once, RIGHT, "").turns]
    assert roles == ["user", "assistant", "assistant"]
    assert build_trajectory("row", at_once, RIGHT, "").hidden is None, "of one turn alone"
    with pytest.raises(ValueError, match="turn 1"):
        build_trajectory("row", [turns[0], completion([1, 2, 4], [4])], RIGHT, "")
    failed = turns[0].replace(finish_reason="error", error="out of pages")
    with pytest.raises(RuntimeError, match=r"row: .*pages"):
        build_trajectory("row", [failed], RIGHT, "")


class Echo:
    """An engine that tells what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[SamplingParams, bool]] = []

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, options: Any, **_: object
    ) -> list[Completion]:
        self.asked.append((params, options.hidden_states))
        return [completion(prompt, [5], options.hidden_states) for _ in range(params.n)]


def actor_of(engine: Any, **changes: Any) -> Actor:
    base: dict[str, Any] = {
        "engine": engine,
        "language": PUZZLE_LANGUAGE,
        "judge": None,
        "params": SamplingParams(max_tokens=10),
        "decoding": DENSE,
        "samples": 4,
        "context": 12,
        "watched": 3,
        "key": (0, 0, 0),
    }
    return Actor(**(base | changes))


def test_an_actor_gives_as_many_as_it_is_asked_for() -> None:
    engine = Echo()
    actor = actor_of(engine)

    def asked(**settings: Any) -> list[bool]:
        return [one.hidden is not None for one in asyncio.run(actor.generate([1], **settings))]

    assert asked(n=4) == [False, True, True, True]
    assert asked(n=2) == [True, True], "fewer than are to be watched"
    engine.asked.clear()
    assert [asked(turn=1, sample=number) for number in range(3)] == [[False]] * 3
    assert asked(turn=1, sample=3, watched=1) == [True]
    assert len({params.seed for params, _ in engine.asked}) == 4
    engine.asked.clear()
    asyncio.run(actor.generate([1] * 9, watched=0))
    assert engine.asked[0][0].max_tokens == actor.room([1] * 9) == 3
    with pytest.raises(ValueError, match="12 tokens"):
        asyncio.run(actor.generate([1] * 12))
    assert load_episode(None) is single_turn
    with pytest.raises(ValueError, match=r"rollout\.episode.*async"):
        load_episode("support.rewards:odd")


class Canned:
    """A backend that is no engine of ours: it answers every prompt with the same tokens."""

    max_context = 256

    def __init__(self) -> None:
        self.versions: list[int] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Canned"]:
        yield self

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **_: object
    ) -> list[Completion]:
        return [completion(prompt, [5, 6]) for _ in range(params.n)]

    def sync_weights(
        self, weights: Mapping[str, torch.Tensor], *, version: int, adapter: Adapter | None = None
    ) -> None:
        self.versions.append(version)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def header(self) -> str:
        return "canned answers"


def test_another_backend_plugs_in(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the methods of the protocol alone; a run, its validation and its header use no others."""
    canned = Canned()
    backend: RolloutBackend = canned
    monkeypatch.setattr("sparrow.dataflow.local.run.open_backend", lambda *_, **__: backend)
    held_out, run = {"every": 1, "rows": 2}, {"steps": 2}
    chosen = config(model, tmp_path / "run", gate={"mode": "off"}, validation=held_out, run=run)
    assert any("canned answers" in line for line in trained(chosen).header())
    assert canned.versions == [1, 2]
    assert len(lines(tmp_path / "run" / "validation.jsonl")) == 3
    played = [one for group in read_rollouts(tmp_path / "run", 1) for one in group.trajectories]
    assert {tuple(one.ids[-2:].tolist()) for one in played} == {(5, 6)}


def test_chat_messages_and_a_reward_by_import_path(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": [{"role": "user", "content": "x1 = 3"}], "answer": "3", "data_source": "own"}\n'
        '{"prompt": "x2 = 3", "answer": "4", "data_source": "own"}\n'
    )
    data = {"file": str(file), "task": None, "reward": "support.rewards:odd", "workers": 1}
    run = trained(
        config(chat_model, tmp_path / "run", data=data, rollout=SHORT, run=ONE), judge=None
    )
    groups = {group.prompt_id: group for group in read_rollouts(tmp_path / "run", 0)}
    prompts = {
        name: group.trajectories[0].ids[: group.trajectories[0].turns[0].stop].tolist()
        for name, group in groups.items()
    }
    assert prompts == {"row 0": encode("x1 = 3 <think>"), "row 1": encode("x2 = 3 <think>")}
    (found,) = metrics(tmp_path / "run")
    assert 0 < found["critic/score/mean"] < 1
    for one in (one for group in groups.values() for one in group.trajectories):
        assert one.text is not None
        assert one.reward == sum(map(len, one.text.split())) % 2
    assert learnt(run, chat_model)


async def broken(actor: Actor, example: Example) -> list[Trajectory]:
    if actor.key[1] == 1:
        raise KeyError("a bug of the user's")
    return await single_turn(actor, example)


async def empty(actor: Actor, example: Example) -> list[Trajectory]:
    return []


def changed(**fields: Any) -> Any:
    async def episode(actor: Actor, example: Example) -> list[Trajectory]:
        return [one.replace(**fields) for one in await single_turn(actor, example)]

    return episode


async def twice(actor: Actor, example: Example) -> list[Trajectory]:
    return 2 * await single_turn(actor, example)


def test_sections_at_their_defaults_may_be_changed_when_a_run_goes_on(
    model: Path, tmp_path: Path
) -> None:
    chosen = config(model, tmp_path / "run", rollout=SHORT, run={"steps": 1})
    plain = {"gate": GateConfig(), "optimiser": RateConfig(), "batch": BatchConfig()}
    trained(chosen.replace(**plain))
    other = {"gate": GateConfig(mode="off"), "optimiser": RateConfig(rate=1e-4)}
    other |= {"batch": BatchConfig(tokens=512), "run": chosen.run.replace(steps=2)}
    trained(chosen.replace(**plain | other))
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_an_episode_that_fails_loses_nothing(model: Path, tmp_path: Path) -> None:
    chosen = config(model, tmp_path / "run", rollout=SHORT, run={"steps": 2, "save_every": 50})
    with pytest.raises(EpisodeFailed, match=r"step 1.*KeyError"):
        trained(chosen, episode=broken)
    assert (tmp_path / "run" / "checkpoints" / "step_000001").exists()
    trained(chosen)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_what_an_episode_must_give(model: Path, tmp_path: Path) -> None:
    chosen = config(model, tmp_path / "run", algorithm={"name": "dapo"}, rollout=SHORT)
    run = open_run(chosen, judge=noisy)
    side = rollout_side(run)
    for episode, told in (
        (empty, "trajectories"),
        (changed(reward=None), "reward"),
        (changed(acc=None), "acc"),
        (changed(prompt_id="other"), "trajectories.*other"),
        (changed(acc=3.0), "0 to 1"),
        (twice, "given twice"),
    ):
        side.episode = episode
        with pytest.raises(EpisodeFailed, match=rf"step 0\b.*assignments-.*{told}"):
            run.rollout.generate(run.request())
    side.episode, side.judge = single_turn, right
    played = run.rollout.generate(run.request())
    assert (played.rounds, len(played.watched)) == (4, 4), "refills watch no more than was asked"
    run.close()


def test_a_fault_of_another_rank_s_judge_is_told(model: Path, tmp_path: Path) -> None:
    class Two(World):
        """Beside another rank, whose last verdict failed."""

        def all_gather(self, own: Any) -> list[Any]:
            other = (Counter(judged=1, errors=1), "it raised")
            return [own, other] if isinstance(own, tuple) else [own]

    with open_run(config(model, tmp_path / "run", rollout=SHORT), judge=noisy) as run:
        rollout_side(run).world = Two()
        played = run.rollout.generate(run.request())
    assert (played.fault, played.failed) == ("it raised", {"errors": 1})


def test_kl_from_the_weights_of_the_start(model: Path, tmp_path: Path) -> None:
    """0 before the first update, above it then; a resumed run measures from the same weights."""

    def chosen(name: str, steps: int, **algorithm: Any) -> TrainConfig:
        parts = {"rollout": SHORT, "algorithm": {"kl": 0.1, **algorithm}, "run": {"steps": steps}}
        return config(model, tmp_path / name, **parts)

    trained(chosen("whole", 3))
    trained(chosen("cut", 2))
    trained(chosen("cut", 3))
    found = [line["actor/kl_reference"] for line in metrics(tmp_path / "whole")]
    assert found[0] == 0
    assert min(found[1:]) > 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    other = model_folder(tmp_path / "other", size=5.0)
    trained(chosen("run", 1, reference=str(other)))
    assert metrics(tmp_path / "run")[0]["actor/kl_reference"] > 0
    shutil.rmtree(other)
    model_folder(other, size=4.0)  # another model of the same name is another reference
    with pytest.raises(ValueError, match="another configuration"):
        open_run(chosen("run", 2, reference=str(other)))


def test_a_reference_needs_the_same_vocabulary(model: Path, tmp_path: Path) -> None:
    made = models.random("qwen3-0.6b", **TINY, vocabulary=61)
    models.save(made, tmp_path / "other", tokenizer=model)
    algorithm = {"kl": 0.1, "reference": str(tmp_path / "other")}
    with pytest.raises(ValueError, match=r"algorithm\.reference"):
        open_run(config(model, tmp_path / "run", algorithm=algorithm))
    with pytest.raises(ValueError, match="reference"):
        config(model, tmp_path / "run", algorithm={"reference": "tiny"})
