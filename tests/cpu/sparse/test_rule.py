"""Rules: every flow decodes as it is seen in one pass; schedules of other rules are refused."""

import re

import pytest
import torch
from support.flows import COUNTING, IN_FP8, LIBRARY, make_cache, mean_flow
from support.paging import slots_of
from torch import Tensor

from sparrow import ops
from sparrow.models.attention import PackedSparse
from sparrow.ops.reference import attention as definitions
from sparrow.schema.schedule import Schedule, kept_tokens
from sparrow.sparse import preset
from sparrow.sparse.flows import library, two_stage, union
from sparrow.sparse.rule import Rule

LAYERS, SPARSE = 3, 2


@pytest.mark.parametrize(("page", "first", "last"), [(16, 1, 2), (4, 0, 1), (5, 3, 2), (1, 1, 1)])
def test_kept_tokens_is_what_select_pages_keeps(page: int, first: int, last: int) -> None:
    lengths_B, budgets_B = torch.cartesian_prod(torch.arange(0, 131), torch.arange(0, 141, 3)).T
    score_BGM = torch.rand(len(lengths_B), 1, -(-130 // page))
    lists = ops.select_pages(score_BGM, lengths_B, budgets_B, page=page, first=first, last=last)
    tokens_BK = (lengths_B[:, None] - lists.pages[:, 0] * page).clamp(0, page)
    tokens_B = tokens_BK.masked_fill(lists.pages[:, 0] < 0, 0).sum(1)
    pairs = zip(lengths_B.tolist(), budgets_B.tolist(), strict=True)
    assert tokens_B.tolist() == [kept_tokens(*pair, page, first, last) for pair in pairs]


def test_schedules_made_for_another_rule_are_refused_by_field() -> None:
    made = preset("qwen3-4b-0.86")
    published = Rule(dense_layers=frozenset((0, 1)))
    published.check(made, page=16, family="qwen3")
    Rule().check(Schedule.fixed(64), page=16, family="llama")  # made by hand: for any
    own = Schedule.fixed(160, page=32, first=2, last=1, dense_layers=())
    Rule(first=2, last=1, dense_layers=frozenset()).check(own, page=32)
    others = {"flow": "quest", "page": 8, "first": 0, "last": 1, "dense_layers": ()}
    for field, value in (others | {"family": "llama"}).items():
        with pytest.raises(ValueError, match=f"{field} "):
            published.check(made.replace(**{field: value}), page=16, family="qwen3")
    rule = Rule(flow=library.quest, first=0, dense_layers=frozenset((2,)))
    place = {"flow": "quest", "page": 8, "first": 0, "dense_layers": (2,), "family": "llama"}
    force = ", ".join(f"{field}={value!r}" for field, value in place.items())
    with pytest.raises(ValueError, match=rf"forced_onto\({re.escape(force)}\)"):
        rule.check(made, page=8, family="llama")
    rule.check(made.forced_onto(**place), page=8, family="llama")


# Any flow: token by token through a cache, and whole sequences in one pass.

PAGE, SIZE, HEADS, KV_HEADS, SCALE = 8, 8, 6, 2, 0.5
TOP_P = mean_flow("top-p", library.softmax_sum.score, mass=0.7)
UNION = mean_flow("union", lambda q, f, p: union(q[0] @ f.mean, (q @ f.mean).sum(), 0.3))
STAGES = mean_flow("stages", lambda q, f, p: two_stage(f.mean.sum(), (q @ f.mean).max(), 1.5))
FLOWS = {flow.name: flow for flow in (*LIBRARY, TOP_P, UNION, STAGES, IN_FP8, COUNTING)}
EXACT = {"union", "stages"} | {
    "block-mean",
    "quest",
    "sub-quest-4",
    "running-average-0.5",
    "window",
    "counting",
}


def sequence(length: int, *, whole: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one sequence; `whole` numbers are few, so that scores tie exactly."""
    generator = torch.Generator().manual_seed(seed + length)

    def draw(heads: int) -> Tensor:
        shape = (length, heads, SIZE)
        drawn = torch.randint(-1, 2, shape, generator=generator)
        return drawn.float() if whole else torch.randn(shape, generator=generator)

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def empty_cache(rule: Rule, length: int) -> ops.PageCache:
    pages = -(-length // PAGE) + 2
    sizes = {"layers": LAYERS, "kv_heads": KV_HEADS, "slots": 2, "width": pages}
    cache = make_cache(rule, PAGE, SIZE, pages, torch.float32, **sizes)
    for field in cache.page_fields:
        bits = cache.field(field.name, SPARSE)
        bits.view(torch.uint8).fill_(0xFF)  # NaN wherever nothing is written
    cache.begin(1)
    return cache


def decode(
    rule: Rule, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prompt: int, budgets: Tensor
) -> Tensor:
    """Prompt first, then token by token through a cache of shuffled pages: [S - prompt, H, D]."""
    length = len(q_SHD)
    cache = empty_cache(rule, length)
    table_BM = torch.randperm(cache.pages, generator=torch.Generator().manual_seed(1))[None, :-2]
    slots_S = slots_of(table_BM[0], torch.arange(length), PAGE)
    pools = cache.field("k", SPARSE), cache.field("v", SPARSE)
    ops.write_pages(*pools, k_SGD[:prompt], v_SGD[:prompt], slots_S[:prompt])
    rule.summarise(cache, SPARSE, slots_S[:prompt])
    outputs = []
    for token in range(prompt, length):
        one, lengths_B = slice(token, token + 1), torch.tensor([token + 1])
        rule.append(cache, SPARSE, k_SGD[one], v_SGD[one], slots_S[one])
        given = (q_SHD[one], table_BM, lengths_B, budgets[one], torch.tensor([1]))
        lists = rule.select(cache, SPARSE, *given)
        pages = (*pools, table_BM, lengths_B, lists)
        outputs.append(ops.attend_decode(q_SHD[one], *pages, scale=SCALE))
    for state in cache.state_fields:  # of other requests and layers
        assert not cache.state(state.name, SPARSE)[0].any()
        assert not cache.state(state.name, 0)[0].any()
    return torch.cat(outputs)


def in_one_pass(
    rule: Rule, sequences: list[tuple[Tensor, Tensor, Tensor]], prompts: list[int], budgets: Tensor
) -> Tensor:
    lengths = [len(q) for q, _, _ in sequences]
    rows = {"bounds": torch.tensor([0, *lengths]).cumsum(0), "dense_B": torch.tensor(prompts)}
    rows["budgets"] = budgets.expand(LAYERS, *budgets.shape)
    attention = PackedSparse(**rows, page=PAGE, rule=rule)
    packed = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    return attention(SPARSE, *packed, scale=SCALE)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 1)])
def test_decoding_sees_what_one_pass_sees(name: str, first: int, last: int) -> None:
    """Packed side by side: one page, one token more, odd lengths, and the budget's own length."""
    rule = Rule(flow=FLOWS[name], first=first, last=last)
    lengths, prompts = [5, 8, 9, 61, 40, 75], [1, 7, 3, 20, 39, 50]
    sequences = [sequence(length) for length in lengths]
    budgets_T = torch.full((sum(lengths),), 40)
    together = in_one_pass(rule, sequences, prompts, budgets_T).split(lengths)
    whole = in_one_pass(rule, sequences, prompts, torch.full_like(budgets_T, 1000)).split(lengths)
    for mine, every, one, prompt in zip(together, whole, sequences, prompts, strict=True):
        alone = decode(rule, *one, prompt, budgets_T[: len(mine)])
        torch.testing.assert_close(mine[prompt:], alone, atol=1e-5, rtol=1e-4)
        if rule.mass is None:  # 40 tokens are kept, which is all of the shorter ones
            short = slice(0, 40)
            torch.testing.assert_close(mine[short], every[short], atol=1e-6, rtol=1e-5)
        assert len(mine) < 61 or not torch.allclose(mine[prompt:], every[prompt:], atol=1e-2)


@pytest.mark.parametrize("name", FLOWS)
def test_budgets_by_head_in_decoding_and_in_one_pass(name: str) -> None:
    rule = Rule(flow=FLOWS[name])
    one = sequence(83, seed=5)
    budgets_TG = torch.tensor([[24, 56]]).expand(83, KV_HEADS)
    mine = in_one_pass(rule, [one], [11], budgets_TG)[11:]
    torch.testing.assert_close(mine, decode(rule, *one, 11, budgets_TG), atol=1e-5, rtol=1e-4)
    common = in_one_pass(rule, [one], [11], torch.full((83,), 24))[11:]
    torch.testing.assert_close(mine[:, :3], common[:, :3], atol=1e-6, rtol=1e-5)
    assert rule.mass is not None or not torch.allclose(mine[:, 3:], common[:, 3:], atol=1e-2)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_ties_fall_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of -1, 0 and 1, and means of two heads: scores are exact and tie often.

    Of several blocks of queries, and with a budget for every token.
    """
    monkeypatch.setattr(definitions, "QUERY_BLOCK", 16)
    rule = Rule(flow=FLOWS[name], first=1, last=1)
    for length in (24, 83):
        q_SHD, k_SGD, v_SGD = sequence(length, whole=True)
        one = q_SHD[:, : 2 * KV_HEADS], k_SGD, v_SGD
        budgets_T = torch.randint(100, (length,), generator=torch.Generator().manual_seed(length))
        mine = in_one_pass(rule, [one], [4], budgets_T)[4:]
        torch.testing.assert_close(mine, decode(rule, *one, 4, budgets_T), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FLOWS)
def test_prefill_and_decoding_store_the_same_bits(name: str) -> None:
    rule, length = Rule(flow=FLOWS[name]), 29
    _, k_SGD, v_SGD = sequence(length)
    by_prefill, by_decoding = empty_cache(rule, length), empty_cache(rule, length)
    slots_S = slots_of(torch.tensor([3, 0, 4, 1]), torch.arange(length), PAGE)
    k_pool, v_pool = (by_prefill.field(name, SPARSE) for name in "kv")
    ops.write_pages(k_pool, v_pool, k_SGD, v_SGD, slots_S)
    padded = torch.cat([slots_S, torch.tensor([-1, -1])])
    rule.summarise(by_prefill, SPARSE, padded)
    for token in range(length):
        one = slice(token, token + 1)
        rule.append(by_decoding, SPARSE, k_SGD[one], v_SGD[one], slots_S[one])
    for field in by_prefill.page_fields:
        left, right = (c.field(field.name, SPARSE) for c in (by_prefill, by_decoding))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), field.name
        untouched = left[[1, 2, 5]].view(torch.uint8)
        assert field.name in "kv" or (untouched == 0xFF).all(), field.name
        assert not by_prefill.field(field.name, 0).view(torch.uint8).any()


def test_a_selection_needs_budgets_and_rows_that_fit() -> None:
    given = (torch.randn(1, HEADS, SIZE), torch.arange(3)[None], torch.tensor([24]))
    for flow, budgets, word in (
        (TOP_P, torch.full((1, 1), 24), "budgets"),
        (library.running_average(), torch.tensor([24]), "rows"),  # of the state
    ):
        rule = Rule(flow=flow)
        with pytest.raises(ValueError, match=word):
            rule.select(empty_cache(rule, 24), SPARSE, *given, budgets)
    dense = Rule(dense_layers=frozenset({SPARSE}))
    assert dense.select(empty_cache(dense, 24), SPARSE, *given, torch.tensor([24])) is None


def test_a_rule_is_made_of_the_flow_that_a_schedule_names() -> None:
    schedule = Schedule.fixed(64, flow="quest", first=0, last=3, dense_layers=(2,))
    rule = Rule.of(schedule, library.quest)
    assert (rule.name, rule.first, rule.last, rule.dense_layers) == ("quest", 0, 3, {2})
    rule.check(schedule, page=16)
    with pytest.raises(ValueError, match=r"'quest'.*'block-mean'"):
        Rule.of(schedule)
    with pytest.raises(ValueError, match="-1"):
        Rule(first=-1)
