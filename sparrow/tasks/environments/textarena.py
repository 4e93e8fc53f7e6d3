"""Games of textarena for one player (`pip install 'sparrow-rl[envs]'`), as environments.

Of the public packages of environments this one is light. `verifiers` was looked at: it needs
openai < 3, where our own clients are tested with openai >= 3.

The games draw from Python's one generator of random numbers, also while they are played. So each
game has a state of it, seeded by its row, and games are called one at a time. Some games need
words that nltk downloads (Wordle, Hangman), or a key of OpenRouter (TwentyQuestions): without them
they cannot be opened.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from sparrow.tasks.base import (
    RIGHT,
    Example,
    Row,
    Verdict,
    check_row,
    check_seed,
    optional_package,
    wrong,
)
from sparrow.tasks.environments.base import Observation, RowKey, Synchronous, without_thoughts

ARENA = "textarena/"
PATIENCE = 5.0  # seconds that a game waits for others: less than a step may take, so it says why
_turn = threading.Lock()  # whose game uses the random numbers


class Game:
    """One play of a game: what it says first, and answers to moves."""

    def __init__(self, name: str, seed: int) -> None:
        self._numbers = random.Random(seed).getstate()
        with self._own_numbers():
            self._game = _opened(name, seed)
            self._inner = self._game
            while isinstance(self._inner, _package().Wrapper):  # they repeat the whole play
                self._inner = self._inner.env
            self.text = self._heard()

    def move(self, action: str) -> Observation:
        with self._own_numbers():
            done, _ = self._game.step(without_thoughts(action))
            text = self._heard()
            if not done:
                return Observation(text)
            rewards, info = self._game.close()
        reward = float((rewards or {}).get(0, 0.0))
        reason = str(info[0].get("reason") or "")
        return Observation(text or reason, reward, True, {"reason": reason})

    def _heard(self) -> str:
        """What the game says since the last move, without the move."""
        _, messages = self._inner.get_observation()
        own = _package().ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not own)

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        if not _turn.acquire(timeout=PATIENCE):
            raise RuntimeError(f"another game of textarena did not return within {PATIENCE:g} s")
        before = random.getstate()
        random.setstate(self._numbers)
        try:
            yield
        finally:
            self._numbers = random.getstate()
            random.setstate(before)
            _turn.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArena:
    """Rows of a game, by seed; `length` is recorded only. A text is judged as its only move."""

    lengths: ClassVar[tuple[int, int]] = (1, 1 << 20)
    game: str

    def __post_init__(self) -> None:
        Game(self.game, 0)  # a game that cannot be opened is named at once

    @property
    def name(self) -> str:
        return f"textarena-{self.game}"

    def row(self, seed: int, length: int) -> Row:
        check_seed(self.name, seed, length, self.lengths)
        prompt = Game(self.game, seed).text
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data={})

    def reward(self, row: Row, text: str) -> Verdict:
        """Judge a text as the first move: right if it ends the game with its full reward."""
        check_row(self.name, row)
        seen = Game(self.game, row.seed).move(text)
        if not seen.done:
            return wrong("the game goes on: it is to be played in an episode")
        return RIGHT if seen.reward >= 1 else Verdict(seen.reward, 0.0, seen.info["reason"])


class TextArenaEnvironment(Synchronous):
    """A game of textarena; its rows are those of the task textarena/NAME."""

    def __init__(self, game: str) -> None:
        self.name = f"{ARENA}{TextArena(game=game).game}"
        self._game: Game | None = None

    def begin(self, example: Example) -> Observation:
        key = RowKey.of(example)
        if key.family != self.name:
            raise ValueError(f"expected a row of {self.name}, got one of {key.family}")
        self._game = Game(self.name.removeprefix(ARENA), key.seed)
        return Observation(self._game.text)

    def act(self, action: str) -> Observation:
        if self._game is None:
            raise ValueError("expected reset before step")
        return self._game.move(action)


def _opened(name: str, seed: int) -> Any:
    """Open a game; ValueError if there is none, if it lacks something, or wants more players."""
    known = _package().envs.registration.ENV_REGISTRY
    if name not in known:
        near = ", ".join(get_close_matches(name, known)) or "others: textarena.ai"
        raise ValueError(f"textarena has no game {name!r}; it has {near}")
    try:
        game = _package().make(name)
        game.reset(num_players=1, seed=seed)
    except Exception as error:  # third-party code: downloads, keys, files that are not there
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"textarena's {name} cannot be played: {said:.300}") from error
    if not isinstance(game.state, _package().SinglePlayerState):
        raise ValueError(f"expected a game for one player, got textarena's {name}")
    return game


def _package() -> Any:
    return optional_package("textarena", "envs", "a game of textarena")
