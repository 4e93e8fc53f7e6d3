"""Trees of agents: by hand, under faults, within budgets, with one slot, and in a run."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.agents import EngineFault, RandomLives, RandomSampler, actor, play, task
from support.teams import team
from support.training import config, lines, metrics, noisy, trained

from sparrow.dataflow.agents import Agent, AgentResult, Budget, Life, OutOfBudget, play_agents
from sparrow.dataflow.asynchronous.audit import audit
from sparrow.dataflow.local.learner_batch import credit
from sparrow.dataflow.local.loop import open_training, replay, train
from sparrow.dataflow.run_files import read_rollouts, write_rollouts
from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.models import load
from sparrow.schema.agents import AgentNode, AgentsConfig, audit_tree
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.train import AlgorithmConfig
from sparrow.tasks.base import encode
from sparrow.training.objectives.algorithms import make_algorithm

SMALL = AgentsConfig(children=2, depth=3, steps=20, tokens=300, reply=10)


def binary(rewards: dict[tuple[int, ...], float]) -> Life:
    """Every agent says something, has two children until level 3, tells them apart, and ends."""

    async def life(agent: Agent) -> AgentResult:
        await agent.reply()
        if agent.can_spawn:
            results = await agent.spawn([task("find x1"), task("find x2")])
            for result in results:
                agent.hear(result.message)
            await agent.reply()
        number = agent.node[-1]
        return AgentResult(message=f"x{number}", reward=rewards.get(agent.node, 0.0))

    return life


def test_a_tree_by_hand() -> None:
    """Seven agents: one root, two children, four grandchildren; ten replies."""
    rewards = {(0,): 1.0, (0, 0): 0.5, (0, 1): 0.25, (0, 1, 1): 0.75}
    limits = AgentsConfig(children=2, depth=3, reply=4, team=0.5, parent=0.25)
    tree, trajectories = play(RandomSampler(Random(0)), binary(rewards), limits)
    places = [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0), (0, 1, 1)]
    assert [t.node for t in trajectories] == places
    order = [(0, 0, 0), (0, 0, 1), (0, 0), (0, 1, 0), (0, 1, 1), (0, 1), (0,)]
    assert [node.node for node in tree.nodes] == order  # children end before their parents
    own = [rewards.get(place, 0.0) for place in places]
    parents = [1.0, 1.0, 0.5, 0.5, 1.0, 0.25, 0.25]
    mixed = [
        0.25 * mine + 0.5 * 1.0 + 0.25 * theirs for mine, theirs in zip(own, parents, strict=True)
    ]
    assert [t.reward for t in trajectories] == pytest.approx(mixed)
    assert {t.team_reward for t in trajectories} == {1.0}
    assert [t.subgroup for t in trajectories] == [f"level {len(place)}" for place in places]
    assert {t.prompt_id for t in trajectories} == {"from x1"}
    assert [len(t.agents) for t in trajectories] == [7, 0, 0, 0, 0, 0, 0]
    steps = {node.node: node.steps for node in trajectories[0].agents}
    assert [steps[place] for place in places] == [2, 2, 1, 1, 2, 1, 1]
    assert audit_tree(trajectories[0].agents, limits) == []


def test_a_parent_sees_the_final_messages_of_its_children_and_nothing_else() -> None:
    _, trajectories = play(RandomSampler(Random(1)), binary({}), SMALL)
    root = trajectories[0]
    heard = [
        root.ids[turn.start : turn.stop].tolist() for turn in root.turns if turn.role == "tool"
    ]
    assert heard == [encode("x0 x1")]
    assert root.ids[: root.turns[0].stop].tolist() == encode("from x1")


def test_advantages_are_by_level() -> None:
    """Two plays: roots 1 and 0; children 1, 0 and 1, 1 of the two plays; Dr.GRPO by hand."""
    rewards = [{(0,): 1.0, (0, 0): 1.0}, {(1, 0): 1.0, (1, 1): 1.0}]
    limits = AgentsConfig(children=2, depth=2, reply=4)
    player = actor(RandomSampler(Random(0)), samples=2, agents=limits)
    played = asyncio.run(play_agents(player, task("from x1"), lambda n: binary(rewards[n])))
    group = Group(prompt_id="from x1", trajectories=tuple(played))
    algorithm = make_algorithm(AlgorithmConfig(name="dr-grpo"), max_tokens=8)
    found = [sample.advantage for sample in credit([group], algorithm, limit=8)]
    assert [t.node for t in played] == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert found == pytest.approx([0.5, 0.25, -0.75, -0.5, 0.25, 0.25])


def test_budgets() -> None:
    budget = Budget(5, 100)
    assert budget.reserve(30) == 30
    parts = budget.split(2)
    assert [(part.steps, part.tokens) for part in parts] == [(1, 23), (1, 23)]
    assert (budget.steps, budget.tokens) == (2, 24)
    assert parts[0].reserve(99) == 23
    with pytest.raises(OutOfBudget):
        parts[0].reserve(1)
    budget.merge(parts[1])
    assert (budget.steps, budget.tokens, parts[1].tokens) == (3, 47, 0)


@pytest.mark.parametrize("limit", ["steps", "tokens"])
def test_an_agent_without_budget_ends_and_its_parent_is_told(limit: str) -> None:
    limits = SMALL.replace(**{limit: 3}, reply=1)
    tree, trajectories = play(RandomSampler(Random(0)), binary({}), limits)
    assert {node.status for node in tree.nodes} == {"done", "out_of_budget"}
    assert sum(getattr(node, limit) for node in tree.nodes) == 3
    assert tree.nodes[-1].status == "out_of_budget"  # the root could not reply again
    assert trajectories


def test_a_full_context_is_an_end() -> None:
    async def talks(agent: Agent) -> AgentResult:
        while True:
            await agent.reply()

    tree, _ = play(RandomSampler(Random(0)), talks, AgentsConfig(), context=30)
    assert tree.nodes[0].status == "out_of_context"
    assert tree.nodes[0].context == 30


def test_how_a_child_ends_is_data() -> None:
    async def life(agent: Agent) -> AgentResult:
        if len(agent.node) > 1:
            doing = agent.example.prompt
            await agent.reply()
            if doing == "try x1":
                raise KeyError("no such item")
            await asyncio.sleep(60)
        await agent.reply()
        (failed,) = await agent.spawn([task("try x1")])
        hangs = agent.start(task("try x2"))
        await asyncio.sleep(0.01)
        hangs.abort()
        (late,) = await agent.spawn([task("try x3")])
        at_once = agent.start(task("try x4"))
        at_once.abort()
        never = await at_once.result()
        refused = await agent.spawn([task("try x5")])
        stopped = await hangs.result()
        statuses = (failed, stopped, late, never, *refused)
        return AgentResult(message=" ".join(result.status for result in statuses), reward=1.0)

    limits = AgentsConfig(reply=3, seconds=0.2)
    tree, _ = play(RandomSampler(Random(0)), life, limits)
    nodes = {node.node: node for node in tree.nodes}
    statuses = [nodes[place].status for place in [(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert statuses == ["failed", "aborted", "timeout", "aborted"]
    assert "KeyError" in nodes[0, 0].reason
    assert nodes[0, 3].steps == 0
    assert nodes[(0,)].status in ("done", "timeout")
    assert len(nodes) == 5


@pytest.mark.parametrize("fault", ["exit", "message"])
def test_code_that_ends_the_program_or_returns_nonsense_fails_its_agent(fault: str) -> None:
    def faulty() -> AgentResult:
        if fault == "exit":
            raise SystemExit(3)
        return AgentResult(message=None)

    async def child(agent: Agent) -> AgentResult:
        if len(agent.node) > 1:
            return faulty()
        (result,) = await agent.spawn([task()])
        return AgentResult(message=result.status)

    async def root(agent: Agent) -> AgentResult:
        return faulty()

    tree, _ = play(RandomSampler(Random(0)), child, SMALL)
    assert tree.nodes[-1].message == "failed"
    with pytest.raises((RuntimeError, TypeError), match=f"(?i){fault}"):
        play(RandomSampler(Random(0)), root, SMALL)


def test_an_error_of_a_root_is_an_error_of_the_episode() -> None:
    async def life(agent: Agent) -> AgentResult:
        raise KeyError("a mistake in the code")

    with pytest.raises(KeyError):
        play(RandomSampler(Random(0)), life, SMALL)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_random_trees_under_faults_end_once_and_within_budgets(first: int, parallel: bool) -> None:
    """1000 in all: nothing hangs, nothing is lost, no budget is exceeded."""
    for seed in range(first, first + 100):
        rng = Random(f"{seed} {parallel}")
        limits = AgentsConfig(
            children=rng.randint(0, 4),
            depth=rng.randint(1, 4),
            steps=rng.randint(1, 40),
            tokens=rng.randint(1, 400),
            reply=rng.choice([None, 5, 20]),
            seconds=rng.choice([None, None, 0.02]),
            parallel=parallel,
        )
        sampler = RandomSampler(rng, failing=0.05, slots=rng.choice([1, 2, None]))
        lives = RandomLives(rng)
        try:
            tree, trajectories = play(sampler, lives, limits)
        except EngineFault:  # the root's: an error of the episode
            continue
        assert audit_tree(tuple(tree.nodes), limits) == []
        assert len(tree.nodes) >= lives.begun  # one that was aborted at once never began
        assert sampler.under_way == 0
        sampled = sum(int(t.loss_mask.sum()) for t in trajectories)
        assert sampled == sum(node.tokens for node in tree.nodes) <= limits.tokens
        if trajectories:
            assert trajectories[0].agents == tuple(sorted(tree.nodes, key=lambda node: node.node))


def test_random_trees_play_again_alike() -> None:
    for seed in range(20):
        played = []
        for _ in range(2):
            rng = Random(seed)
            tree, trajectories = play(RandomSampler(rng), RandomLives(rng), SMALL)
            played.append(([n.replace(seconds=0.0) for n in tree.nodes], len(trajectories)))
        assert played[0] == played[1]


def node(*place: int, steps: int = 1, tokens: int = 5) -> AgentNode:
    return AgentNode(
        node=place,
        task="",
        policy="",
        status="done",
        reason="",
        message="",
        steps=steps,
        tokens=tokens,
        context=9,
        seconds=0.0,
        reward=0.0,
        acc=None,
    )


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node(0), node(0, 0), node(0, 1)], 0),
        ([node(0), node(0)], 1),
        ([node(0, 0)], 2),
        ([node(0), node(1)], 1),
        ([node(0), node(0, 1)], 1),
        ([node(0), node(0, 0), node(0, 1), node(0, 2)], 1),
        ([node(0), node(0, 0), node(0, 0, 0), node(0, 0, 0, 0)], 1),
        ([node(0, steps=21)], 1),
        ([node(0, tokens=200), node(0, 0, tokens=101)], 1),
        ([], 1),
    ],
)
def test_the_audit_of_a_tree_finds_what_is_wrong(nodes: list[AgentNode], found: int) -> None:
    assert len(audit_tree(tuple(nodes), SMALL)) == found


# With an engine, and in a run.


def test_one_slot_is_enough_for_three_levels(model: Path) -> None:
    """A parent that kept its place while it waits would wait for ever."""

    async def everything() -> list[Trajectory]:
        limits = AgentsConfig(children=2, depth=3, steps=99, tokens=999, reply=4, parallel=True)
        one_slot = Engine(load(model, device="cpu"), max_running=1, kv_bytes=1 << 22)
        async with AsyncEngine(one_slot) as engine:
            player = actor(engine, samples=2, agents=limits)
            return await play_agents(player, task("from x1"), lambda _: binary({}))

    trajectories = asyncio.run(asyncio.wait_for(everything(), 60))
    assert len(trajectories) == 14
    for tree in trajectories[0].agents, trajectories[7].agents:
        assert {one.status for one in tree} == {"done"}


def agents_config(model: Path, out: Path, **changes: Any) -> Any:
    rollout = {"episode": "support.tree_episode:tree_episode", "samples": 3, "prompts": 2}
    rollout |= {"agents": {"reply": 6, "depth": 3, "children": 1}}
    return config(model, out, rollout=rollout | changes.pop("rollout", {}), **changes)


def test_trees_are_saved_counted_and_learnt_from(model: Path, tmp_path: Path) -> None:
    trained(agents_config(model, tmp_path / "run", run={"steps": 2, "rollouts": 1}), judge=noisy)
    groups = read_rollouts(tmp_path / "run", 1)
    trees = [t.agents for group in groups for t in group.trajectories if t.agents]
    assert [len(tree) for tree in trees] == [3] * 6
    assert all(audit_tree(tree, AgentsConfig(reply=6, children=1)) == [] for tree in trees)
    proven = audit(tmp_path / "run")
    assert proven.proven
    assert proven.trees == 12
    (_, last) = metrics(tmp_path / "run")
    assert last["agents/count/mean"] == 3
    assert last["agents/depth/max"] == 3
    assert last["agents/spawned"] == 1
    assert last["agents/status/done"] == 1


def test_trees_play_again_from_their_folder(model: Path, tmp_path: Path) -> None:
    run = {"steps": 2, "rollouts": 1, "save_every": 1}
    trained(agents_config(model, tmp_path / "run", run=run), judge=None)
    replay(tmp_path / "run", 1, "rollout", allow_code=True, out=tmp_path / "again")
    first, again = (read_rollouts(tmp_path / place, 1) for place in ("run", "again"))
    for one, other in zip(first, again, strict=True):
        for agent, same in zip(one.trajectories, other.trajectories, strict=True):
            assert agent.node == same.node
            assert agent.ids.tolist() == same.ids.tolist()
            ended = [[node.replace(seconds=0.0) for node in each.agents] for each in (agent, same)]
            assert ended[0] == ended[1]


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_each_level_has_its_policy(loop: str, model: Path, tmp_path: Path) -> None:
    """The solver is the root, the checker all others: each learns from its own agents."""
    limits = {"reply": 6, "depth": 3, "children": 1, "policies": ["solver", "checker"]}
    rollout = {"episode": "support.tree_episode:tree_episode", "samples": 3, "agents": limits}
    run = {"loop": loop, "rollouts": 1}
    dispatch = {"staleness": 1} if loop == "async" else {}
    chosen = team(model, tmp_path / "run", rollout=rollout, run=run, dispatch=dispatch)
    with open_training(chosen, judge=noisy) as opened:
        train(opened)
    played = [
        t for step in (0, 1) for g in read_rollouts(tmp_path / "run", step) for t in g.trajectories
    ]
    tokens = {"solver": 0, "checker": 0}
    for trajectory in played:
        name = "solver" if len(trajectory.node) == 1 else "checker"
        ids = trajectory.policy_id[trajectory.loss_mask]
        assert {*ids.tolist()} == {[*tokens].index(name)}
        tokens[name] += len(ids)
        for node in trajectory.agents:
            assert node.policy == ("solver" if node.depth == 1 else "checker")
    lines = metrics(tmp_path / "run")
    for name, count in tokens.items():
        assert count == sum(line[f"policy/{name}/tokens_learnt"] for line in lines)
    assert audit(tmp_path / "run").proven


def test_held_out_rows_are_played_as_in_training(model: Path, tmp_path: Path) -> None:
    """Two plays of three rows: the accuracy is that of roots, the tokens those of whole trees."""
    held = {"every": 1, "prompts": 3, "samples": 2, "episode": True}
    trained(agents_config(model, tmp_path / "run", run={"steps": 1}, validation=held), judge=noisy)
    (before, after) = lines(tmp_path / "run" / "validation.jsonl")
    (acc,) = [value for name, value in before.items() if "/acc/mean@2" in name]
    (tokens,) = [value for name, value in before.items() if name.endswith("length/mean")]
    assert acc * 6 == pytest.approx(round(acc * 6))
    assert 3 <= tokens <= 18
    assert before.keys() == after.keys()


def test_the_asynchronous_loop_plays_trees_and_proves_them(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = {"steps": 2, "rollouts": 1, "loop": "async"}
    trained(agents_config(model, out, run=run), judge=None)
    proven = audit(out)
    assert proven.proven, proven.problems
    assert proven.trees == 12
    file = out / "rollouts" / "step_000001.jsonl"
    file.unlink()
    groups = read_rollouts(out, 0)
    first = groups[0].trajectories[0]
    broken = first.replace(agents=(*first.agents, first.agents[-1]))
    rest = groups[0].replace(trajectories=(broken, *groups[0].trajectories[1:]))
    write_rollouts(out, 0, [rest, *groups[1:]])
    assert [problem for problem in audit(out).problems if "ended 2 times" in problem]
