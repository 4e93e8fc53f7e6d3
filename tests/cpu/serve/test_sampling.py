"""Pieces of answers from the engine's outputs, and the log-probs that are shown of them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sparrow.engine.loop import Output
from sparrow.schema.sampling import Completion, FinishReason, SamplingParams
from sparrow.serve.responses import TokenDraw, shown_draws
from sparrow.serve.sampling import Failed, Piece, RequestSampler


class Scripted:
    """An engine that draws one token and then ends the answer for a reason."""

    def __init__(self, reason: FinishReason) -> None:
        self.reason: FinishReason = reason

    async def stream(self, *_: Any, **settings: Any) -> AsyncIterator[Output]:
        if settings["streamed"]:
            yield Output(0, 0, [7], None, logprobs=[-1.0])
        made = Completion(
            prompt_ids=np.array([1], np.int32),
            token_ids=np.array([7], np.int32),
            logprobs=np.array([-1.0], np.float32),
            weight_versions=np.array([0], np.int32),
            finish_reason=self.reason,
            attention="dense",
        )
        yield Output(0, 0, [], made)


def pieces(reason: FinishReason, *, streamed: bool) -> list[Piece]:
    sampler = RequestSampler(Scripted(reason), lambda ids: "x" * len(ids), 4)

    async def read() -> list[Piece]:
        return [piece async for piece in sampler.stream([1], SamplingParams(), streamed=streamed)]

    return asyncio.run(read())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_the_engine_gave_up_is_no_answer(streamed: bool) -> None:
    found = pieces("length", streamed=streamed)
    assert "".join(piece.text for piece in found) == "x"
    with pytest.raises(Failed):
        pieces("abort", streamed=streamed)


def test_greedy_tokens_have_the_log_prob_of_the_model() -> None:
    """Also where another token ties with the one that was drawn."""
    drawn = [TokenDraw(5, 0.0, [(4, -0.5), (5, -0.5)]), TokenDraw(6, 0.0, [(6, -0.1), (1, -3.0)])]
    greedy = shown_draws(drawn, 1, greedy=True)
    assert [(draw.token, draw.logprob, len(draw.top)) for draw in greedy] == [
        (5, -0.5, 1),
        (6, -0.1, 1),
    ]
    assert [draw.logprob for draw in shown_draws(drawn, 0, greedy=False)] == [0.0, 0.0]
