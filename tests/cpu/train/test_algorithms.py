"""What a configuration's words mean, and what is refused at the start."""

from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparrow.schema.train import AlgorithmConfig, Choice
from sparrow.training.objectives.advantages import (
    Rewards,
    batch_normalised,
    grpo,
    mean_centred,
    remax,
    rloo,
)
from sparrow.training.objectives.algorithms import (
    ADVANTAGES,
    AGGREGATES,
    CORRECTIONS,
    SURROGATES,
    Algorithm,
    make_algorithm,
)
from sparrow.training.objectives.corrections import combine
from sparrow.training.objectives.surrogates import Terms, seq_mean_token_mean, token_mean

STRANGER = '''
"""Functions of somebody else."""

import torch

from sparrow.training.objectives import Surrogate

number = 3


def advantage(groups):
    return [group.rewards * 2 for group in groups]


def surrogate(terms, *, scale: "float" = 1.0, kind="plain", note: str = "", deep: int = 1):
    loss_T = -terms.advantage_T * terms.logprob_T * scale
    return Surrogate(loss_T, torch.zeros_like(loss_T, dtype=torch.bool))


def half(log_rho_T, sequence_T):
    return torch.full_like(log_rho_T, 0.5)


def aggregate(lengths, *, longest: int):
    return lengths / longest


def short(log_rho_T, sequence_T):
    return log_rho_T[:1]


def broken(*anything):
    raise KeyError("lost")


def mean_surrogate(terms):
    return terms.logprob_T.mean()


def one_advantage(groups):
    return [0.0 for group in groups]


def no_advantage(groups):
    pass


def one_coefficient(lengths):
    return 1.0
'''


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "objectives_of_a_stranger.py").write_text(STRANGER)
    (tmp_path / "objectives_that_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "objectives_that_fail.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    return "objectives_of_a_stranger"


def made(max_tokens: int = 100, **settings: Any) -> Algorithm:
    return make_algorithm(AlgorithmConfig(**settings), max_tokens=max_tokens)


def losses(algorithm: Algorithm, *ratios: float, advantage: float = 1.0) -> list[float]:
    """Of tokens with these ratios, each a sequence of its own."""
    old_T = torch.tensor([-log(ratio) for ratio in ratios])
    count = len(ratios)
    terms = Terms(
        torch.zeros(count), old_T, old_T, torch.full((count,), advantage), torch.arange(count)
    )
    return [round(value, 5) for value in algorithm.surrogate(terms).loss_T.tolist()]


PRESETS: list[tuple[str, Callable[..., Any], float, float, bool, int, bool]] = [
    # Coefficients of lengths 1 and 3: by 4 tokens, or by 2 sequences of at most 100 tokens
    ("grpo", grpo, 1.2, 0.25, False, 0, False),
    ("dr-grpo", mean_centred, 1.2, 0.005, False, 0, False),
    ("dapo", grpo, 1.28, 0.25, True, 20, False),
    ("rloo", rloo, 1.2, 0.25, False, 0, False),
    ("remax", remax, 1.2, 0.25, False, 0, True),
    ("reinforce++", batch_normalised, 1.2, 0.25, False, 0, False),
]


def test_presets() -> None:
    for name, advantage, clip, coefficient, dynamic, overlong, greedy in PRESETS:
        found = made(name=name)
        assert found.advantage is advantage
        assert losses(found, 1.0, 2.0) == [-1.0, -clip]
        assert losses(found, 0.5, advantage=-1.0) == [0.8]
        np.testing.assert_allclose(found.aggregate(np.array([1, 3])), [coefficient] * 2)
        assert (found.dynamic, found.overlong, found.greedy) == (dynamic, overlong, greedy)
        # The default correction: token TIS with cap 10
        weight_T = combine(found.corrections, torch.tensor([0.0, 5.0]), torch.tensor([0, 0]))
        assert weight_T.tolist() == [1.0, 10.0]


def test_the_cushion_of_dapo() -> None:
    assert made(20480, name="dapo").overlong == 4096
    assert made(3, name="dapo").overlong == 1
    assert made(name="dapo", overlong=0).overlong == 0
    assert made(name="grpo", overlong=30).overlong == 30
    with pytest.raises(ValueError, match="overlong"):
        made(name="dapo", overlong=101)


def test_what_is_given_wins() -> None:
    found = made(
        name="dapo",
        advantage="mean-centred",
        surrogate=Choice(use="ppo", settings={"high": 0.5, "dual": 3}),
        aggregate="seq-mean-token-mean",
        corrections=(Choice(use="icepop", settings={"high": 2}), Choice(use="veto")),
        dynamic=False,
    )
    assert found.advantage is mean_centred
    assert found.aggregate is seq_mean_token_mean
    assert losses(found, 2.0) == [-1.5]
    assert losses(found, 4.0, advantage=-1.0) == [3.0]
    assert not found.dynamic
    log_rho_T = torch.tensor([0.0, log(3), 0.0, -30.0])
    weight_T = combine(found.corrections, log_rho_T, torch.tensor([0, 0, 1, 1]))
    assert weight_T.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_every_function_has_a_name() -> None:
    assert list(ADVANTAGES) == ["grpo", "mean-centred", "rloo", "remax", "batch-normalised"]
    assert list(AGGREGATES) == ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    assert list(SURROGATES) == ["ppo", "gspo", "cispo", "dppo-tv", "reinforce"]
    sequences = ["sequence-tis", "icepop", "geometric-mask", "veto"]
    assert list(CORRECTIONS) == [
        *("token-tis", *sequences, "sparse-rl-paper", "sparse-rl-release", "m2po")
    ]
    for name in SURROGATES:
        assert losses(made(surrogate=Choice(use=name)), 1.0)[0] in (-1.0, 0.0)
    for name in set(CORRECTIONS) - {"geometric-mask"}:  # which has no defaults
        found = made(corrections=(Choice(use=name),))
        assert combine(found.corrections, torch.zeros(1), torch.tensor([0])).tolist() == [1.0]
    assert made(corrections=()).corrections == ()


def test_gspo_brings_its_aggregate_unless_one_is_given() -> None:
    choice = Choice(use="gspo")
    assert made(surrogate=choice).aggregate is seq_mean_token_mean
    assert made(surrogate=choice, aggregate="token-mean").aggregate is token_mean


def test_greedy_answers_where_they_are_wanted(stranger: str) -> None:
    assert made(name="grpo", advantage="remax").greedy
    assert not made(name="remax", advantage="rloo").greedy
    assert made(name="remax", advantage=f"{stranger}:advantage").greedy
    assert not made(name="grpo", advantage=f"{stranger}:advantage").greedy


def test_functions_of_strangers(stranger: str) -> None:
    found = made(
        max_tokens=4,
        advantage=f"{stranger}:advantage",
        surrogate=Choice(use=f"{stranger}:surrogate", settings={"scale": 2, "kind": "odd"}),
        aggregate=f"{stranger}:aggregate",
        corrections=(Choice(use=f"{stranger}:half"),),
    )
    assert found.advantage([Rewards(np.array([1.0, 3.0]), None)])[0].tolist() == [2.0, 6.0]
    assert found.aggregate(np.array([2, 4])).tolist() == [0.5, 1.0]
    weight_T = combine(found.corrections, torch.zeros(2), torch.tensor([0, 0]))
    assert weight_T.tolist() == [0.5, 0.5]


STRANGERS = "objectives_of_a_stranger"
REFUSED_NAMES: list[tuple[dict[str, Any], str]] = [
    ({"advantage": "gae"}, "advantage.*gae.*mean-centred"),
    ({"surrogate": Choice(use="trpo")}, "surrogate.*trpo.*dppo-tv"),
    ({"aggregate": "median"}, "aggregate.*median.*token-mean"),
    ({"corrections": (Choice(use="token_tis"),)}, "corrections.*token_tis.*token-tis"),
    ({"advantage": "no_such_module:f"}, "no_such_module"),
    ({"advantage": ":f"}, "advantage"),
    ({"advantage": "objectives_that_exit:f"}, "SystemExit"),
    ({"advantage": "objectives_that_fail:f"}, "ZeroDivisionError"),
    ({"advantage": f"{STRANGERS}:f"}, "'f'"),
    ({"advantage": f"{STRANGERS}:number"}, "number"),
    ({"advantage": f"{STRANGERS}:broken"}, "broken.*KeyError"),
    ({"advantage": f"{STRANGERS}:one_advantage"}, "one_advantage"),
    ({"advantage": f"{STRANGERS}:no_advantage"}, "no_advantage.*None"),
    ({"aggregate": f"{STRANGERS}:one_coefficient"}, "one_coefficient"),
    ({"surrogate": Choice(use=f"{STRANGERS}:mean_surrogate")}, "mean_surrogate"),
    ({"corrections": (Choice(use=f"{STRANGERS}:short"),)}, "short"),
]
REFUSED_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"epsilon": 0.2}, "epsilon.*low, high, dual"),
    ("ppo", {"terms": 1}, "terms"),
    ("ppo", {"low": "0.2"}, "low"),
    ("ppo", {"low": True}, "low"),
    ("ppo", {"dual": "c"}, "dual"),
    ("ppo", {"low": -0.5}, "low"),
    ("ppo", {"low": 1.1}, "low"),
    ("ppo", {"high": -0.1}, "high"),
    ("ppo", {"dual": 1.0}, "dual"),
    ("gspo", {"high": -1.0}, "high"),
    ("cispo", {"low": 2.0}, "low"),
    ("dppo-tv", {"most": 0.0}, "most"),
    ("reinforce", {"low": 0.2}, "low"),
    (f"{STRANGERS}:surrogate", {"scale": "big"}, "scale"),
    (f"{STRANGERS}:surrogate", {"note": 1}, "note"),
    (f"{STRANGERS}:surrogate", {"deep": 1.5}, "deep"),
    ("token-tis", {"cap": 0.0}, "cap"),
    ("sequence-tis", {"cap": -1.0}, "cap"),
    ("icepop", {"low": 2.0, "high": 1.0}, "low"),
    ("geometric-mask", {"low": -1.0, "high": 1.0}, "low"),
    ("veto", {"least": 0.0}, "least"),
    ("sparse-rl-paper", {"least": -1.0}, "least"),
    ("sparse-rl-release", {"cap": 0.0}, "cap"),
    ("sparse-rl-release", {"low": 2.0}, "low"),
    ("m2po", {"most": 0.0}, "most"),
]


@pytest.mark.usefixtures("stranger")
def test_what_is_refused_is_named() -> None:
    for settings, field in REFUSED_NAMES:
        with pytest.raises(ValueError, match=field):
            made(**settings)
    for use, settings, field in REFUSED_SETTINGS:
        choice = Choice(use=use, settings=settings)
        own = {"corrections": (choice,)} if use in CORRECTIONS else {"surrogate": choice}
        with pytest.raises(ValueError, match=field) as refused:
            made(**own)
        assert use in str(refused.value)
    with pytest.raises(ValueError, match=r"geometric-mask.*low, high"):
        made(corrections=(Choice(use="geometric-mask"),))
