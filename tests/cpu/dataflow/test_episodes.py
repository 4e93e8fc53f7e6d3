"""Encoders of an episode, conversations with a tool, and the chat settings that reach them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.training import config, metrics, model_folder, trained

from sparrow import models
from sparrow.dataflow.episodes import Actor
from sparrow.dataflow.language import PUZZLE_LANGUAGE, Language, load_language
from sparrow.dataflow.run_files import read_rollouts
from sparrow.engine.answer import DENSE
from sparrow.functions import register
from sparrow.schema.common import ChatConfig
from sparrow.schema.episode import Trajectory
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.tasks.base import Example, Verdict, encode, puzzle_tokenizer

# Roles are words of the puzzles: from (system), find (user), so (assistant), with (tool).
TEMPLATE = """
{%- if messages[0].role != 'system' %}from yes <eos> {% endif -%}
{%- for m in messages -%}
{{ {'system': 'from', 'user': 'find', 'assistant': 'so', 'tool': 'with'}[m.role] }} {{ m.content }} <eos> {% endfor -%}
{%- if add_generation_prompt %}so {% if thinking is defined and not thinking %}</think> {% endif %}{% endif -%}
"""  # noqa: E501
NO_TOOLS = "{% for m in messages if m.role != 'tool' %}{{ m.content }} {% endfor %}<think>"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}no"
)
EXAMPLE = Example(id="row", source="", prompt="x1", ground_truth="5")


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = puzzle_tokenizer()
    made.chat_template = template
    return made


def language(jinja: str | None = TEMPLATE, **chat: Any) -> Language:
    return Language(tokenizer(jinja), "some-model", ChatConfig(**chat))


def actor(spoken: Any) -> Actor:
    params = SamplingParams(max_tokens=10)
    base: dict[str, Any] = {"engine": None, "judge": None, "decoding": DENSE}
    return Actor(language=spoken, params=params, samples=1, context=40, **base)


def test_text_in_mid_episode_is_no_new_chat() -> None:
    """The template's own system prompt, "from yes", stands before the first prompt alone."""
    player = actor(language())
    assert player.encode(EXAMPLE) == encode("from yes <eos> find x1 <eos> so")
    assert player.encode_text("5 = x1") == encode("5 = x1")
    with pytest.raises(TypeError, match=r"actor\.encode_text"):
        player.encode("5 = x1")


def test_a_turn_is_what_the_template_puts_between_two_answers() -> None:
    player = actor(language())
    tool = [{"role": "tool", "content": "5"}]
    between = encode("with 5 <eos> so")
    assert player.encode_turn(tool) == between
    assert player.encode_turn(tool, after=encode("x1 <eos>")) == between
    assert player.encode_turn(tool, after=encode("x1")) == encode("<eos>") + between
    user = {"role": "user", "content": "x2"}
    assert player.encode_turn([*tool, user]) == encode("with 5 <eos> find x2 <eos> so")
    for spoken in (language(NO_TOOLS), language(None), PUZZLE_LANGUAGE):
        with pytest.raises(ValueError, match="template"):
            actor(spoken).encode_turn(tool)


def test_system_prompt_and_arguments_of_the_template() -> None:
    spoken = language(system="no no", template={"thinking": False})
    assert spoken.encode("x1") == encode("from no no <eos> find x1 <eos> so </think>")
    own = ({"role": "system", "content": "x7"}, {"role": "user", "content": "x1"})
    assert spoken.encode(own) == encode("from x7 <eos> find x1 <eos> so </think>")
    assert spoken.encode_turn([{"role": "tool", "content": "5"}])[-1:] == encode("</think>")
    for refused in (
        language(NO_SYSTEM, system="yes"),
        language(NO_TOOLS.replace("tool", "system"), system="yes"),
        language(template={"enable_thinking": False}),
        language(template={"messages": "x1"}),
        language(None, system="yes"),
    ):
        with pytest.raises(ValueError, match="some-model"):
            refused.encode("x1")
    with pytest.raises(ValueError, match=r"chat\.system"):
        language(system="yes").encode("x1", raw=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model", chat=TEMPLATE)


async def with_tool(actor: Actor, example: Example) -> Sequence[Trajectory]:
    """As in the docstring of sparrow/dataflow/episodes.py."""

    async def play(sample: int) -> Trajectory:
        conversation = actor.conversation(example, sample)
        await conversation.reply(max_tokens=6)
        conversation.add("5")
        await conversation.reply(max_tokens=6)
        conversation.add_text("x1 = 5")
        if conversation.room > 0:
            await conversation.reply(max_tokens=6)
        return conversation.trajectory(await actor.judge(example, conversation.text))

    return await asyncio.gather(*map(play, range(actor.samples)))


def test_an_episode_of_a_cell_with_a_conversation(model: Path, tmp_path: Path) -> None:
    """Rows of a file are chats; what the tool says is read, and not learnt from."""
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\nx1,5\nx2,6\n")

    def reward(text: str, answer: str) -> float:
        return float(answer)

    own = {"rows": str(rows), "reward": register(reward, "data.reward")}
    settings: dict[str, dict[str, Any]] = {
        "data": {"task": None, **own},
        "rollout": {"max_tokens": 30, "episode": register(with_tool, "rollout.episode")},
        "gate": {"sample": 3, "least": 1},
        "chat": {"system": "no"},
        "run": {"steps": 1},
    }
    trained(config(model, tmp_path / "run", **settings), judge=None)
    played = [one for group in read_rollouts(tmp_path / "run", 0) for one in group.trajectories]
    assert sorted(trajectory.reward or 0 for trajectory in played) == [5.0] * 4 + [6.0] * 4
    for trajectory in played:
        roles = [turn.role for turn in trajectory.turns]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        ids = trajectory.ids.tolist()
        prompt, _, tool, _, plain, _ = ([*ids[t.start : t.stop]] for t in trajectory.turns)
        assert prompt[:6] in (
            encode("from no <eos> find x1 <eos>"),
            encode("from no <eos> find x2 <eos>"),
        )
        assert tool in (encode("with 5 <eos> so"), encode("<eos> with 5 <eos> so"))
        assert plain == encode("x1 = 5")
        answers = [
            token for turn in trajectory.turns[1::2] for token in ids[turn.start : turn.stop]
        ]
        assert trajectory.text == PUZZLE_LANGUAGE.decode(answers), "words of replies stay apart"
        assert not any(trajectory.loss_mask[t.start : t.stop].any() for t in trajectory.turns[::2])
    assert len({trajectory.ids.tobytes() for trajectory in played}) == 8
    (measured,) = metrics(tmp_path / "run")
    assert measured["sparse/accept_p05"] > 0.999, "hidden states of all three turns"


class Echo:
    """A sampler that answers every prompt with one token."""

    async def generate(self, ids: list[int], params: SamplingParams, **_: Any) -> list[Completion]:
        answer = {"token_ids": [5], "logprobs": [-1.0], "weight_versions": [0]}
        finish = {"finish_reason": "stop", "attention": "dense"}
        return [Completion(prompt_ids=ids, **answer, **finish)]


def test_a_conversation_takes_what_a_reward_may_return_and_refuses_the_rest() -> None:
    player = replace(actor(PUZZLE_LANGUAGE), engine=Echo())
    conversation = player.conversation(EXAMPLE)
    with pytest.raises(ValueError, match="reply"):
        conversation.trajectory(1.0)
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens.*{limit}"):
            asyncio.run(conversation.reply(max_tokens=limit))
    asyncio.run(conversation.reply())
    for verdict in (0.5, {"score": 0.5}, Verdict(0.5, 0.0, "")):
        trajectory = conversation.trajectory(verdict)
        assert (trajectory.reward, trajectory.acc) == (0.5, 0.0)
    for verdict in (None, Verdict(1.0, 2.0, "")):
        with pytest.raises(ValueError, match="must be"):
            conversation.trajectory(verdict)


def test_puzzles_have_no_chat() -> None:
    tiny = models.load("tiny", device="cpu")
    with pytest.raises(ValueError, match=r"chat\.system"):
        load_language(tiny, True, chat=ChatConfig(system="yes")).encode("x1")
