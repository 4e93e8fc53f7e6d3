"""Generated kernels against the meaning of flows: in Triton's interpreter, or on a GPU.

The interpreter gets bf16 and fp8 wrong, so these tests use fp32 and fp16; tests/gpu has the others.
"""

import pytest
import torch

pytest.importorskip("triton")
from support.flows import LAYER, LIBRARY, ODD, Bed, make_bed, mean_flow, same_fields
from support.kernels import DEVICE, check_choice, fill_fields, select

from sparrow.files import cache_folder
from sparrow.sparse.compile.launch import Compiled, ScoreLaunch
from sparrow.sparse.flows import D, Flow, FlowError, P, as_keys, int4, library
from sparrow.sparse.flows.flow import trace

LENGTHS = [1, 16, 100, 48]  # one token, one page, an odd one, what the budget holds exactly
BUDGETS = [48, 48, 64, 48]
FEW = [library.block_mean, library.softmax_max, library.quest]


def bed_of(flow: Flow, lengths: list[int] = LENGTHS, **options) -> Bed:
    return make_bed(flow, lengths, device=DEVICE, **options)


def check(flow: Flow, **options) -> None:
    """Fields, choices, and where there is state the choices after it has moved on."""
    bed = bed_of(flow, **options)
    kernels = Compiled(bed.program, bed.q_BHD.dtype)
    fill_fields(bed, kernels)
    same_fields(bed, 2e-3 if bed.q_BHD.dtype == torch.float16 else 1e-5)
    for _ in range(2 if bed.program.state else 1):
        check_choice(bed, kernels, torch.tensor(BUDGETS, device=DEVICE))


SHAPES = [(2, 32, torch.float16), pytest.param(3, 64, torch.float32, marks=pytest.mark.slow)]


@pytest.mark.parametrize("flow", [*LIBRARY, *ODD], ids=lambda flow: flow.name)
@pytest.mark.parametrize(("group", "size", "dtype"), SHAPES)
def test_kernels_mean_what_the_flow_means(flow, group: int, size: int, dtype) -> None:
    check(flow, group=group, size=size, dtype=dtype)


@pytest.mark.parametrize("flow", FEW, ids=lambda flow: flow.name)
def test_fp32_and_sizes_that_are_no_powers_of_two(flow) -> None:
    check(flow, group=5, size=24, dtype=torch.float32)


@pytest.mark.parametrize(
    "flow",
    [flow if flow in FEW else pytest.param(flow, marks=pytest.mark.slow) for flow in LIBRARY],
    ids=lambda flow: flow.name,
)
def test_ties_go_to_the_earlier_page(flow) -> None:
    bed = bed_of(flow, [120, 83], whole=True)
    kernels = Compiled(bed.program, bed.q_BHD.dtype)
    fill_fields(bed, kernels)
    check_choice(bed, kernels, torch.tensor([[64, 80], [64, 48]], device=DEVICE))  # by KV head


@pytest.mark.parametrize("flow", [library.block_mean, library.fine_means(4)], ids=lambda f: f.name)
def test_tokens_are_appended_and_pages_finished_in_one_go(flow) -> None:
    """And a page gets the same bits as from prefill."""
    bed = bed_of(flow, [16, 32, 7, 33])
    kernels = Compiled(bed.program, bed.q_BHD.dtype)
    fill_fields(bed, kernels)
    page = bed.program.page
    last_B = bed.lengths_B - 1
    slots_B = bed.table_BM[bed.rows_B, last_B // page].long() * page + last_B % page
    slots_B[3] = -1
    pools = [bed.compiled.field(name, LAYER) for name in ("k", "v")]
    k_BGD, v_BGD = (pool[slots_B // page, :, slots_B % page].clone() for pool in pools)
    before = {f.name: bed.compiled.field(f.name, LAYER).clone() for f in bed.compiled.page_fields}
    for pool in pools:  # what is appended must be written, not found
        pool[slots_B[:3] // page, :, slots_B[:3] % page] = float("nan")
    kernels.append(bed.compiled, LAYER, k_BGD, v_BGD, slots_B, write=True)
    for name, block in before.items():
        assert torch.equal(bed.compiled.field(name, LAYER), block), name


def test_many_blocks_and_chunks(monkeypatch) -> None:
    """Rows longer than a program's pages, and passes of several chunks."""
    monkeypatch.setattr("sparrow.sparse.compile.kernels.CHUNK", 16)
    bed = bed_of(library.softmax_sum, [16 * 20 + 5, 16 * 17])
    kernels = Compiled(bed.program, bed.q_BHD.dtype, ScoreLaunch(16, 2, 1, 2))
    fill_fields(bed, kernels)
    check_choice(bed, kernels, torch.tensor([128, 160], device=DEVICE))


def test_a_row_that_keeps_everything_is_not_scored() -> None:
    bed = bed_of(library.softmax_sum, [100, 100])
    kernels = Compiled(bed.program, bed.q_BHD.dtype)
    bed.compiled.field("mean", LAYER).fill_(float("nan"))
    budgets = torch.tensor([2**31 - 1, 100], device=DEVICE)
    assert select(bed, kernels, budgets).counts.tolist() == [[7, 7], [7, 7]]


def test_sources_are_kept_by_content() -> None:
    score = lambda query, fields, position: query.mean(0) @ fields.anything  # noqa: E731
    other = mean_flow("another name", score, field="anything")
    same = trace(other, 16, 32, 2), trace(library.block_mean, 16, 32, 2)
    assert same[0].digest == same[1].digest
    one, two = (Compiled(program, torch.float16) for program in same)
    assert one.module is two.module
    first, again = (Compiled(trace(library.quest, 16, 32, 2), torch.float16) for _ in range(2))
    assert first.module is again.module
    assert list(cache_folder("kernels").glob(f"{first.module.__name__}.py"))
    assert Compiled(trace(library.quest, 16, 64, 2), torch.float16).module is not first.module


def test_a_context_beyond_what_a_program_holds_is_refused() -> None:
    bed = bed_of(library.softmax_sum, [100])
    kernels = Compiled(bed.program, bed.q_BHD.dtype)
    wide_BM = torch.zeros(1, 32769, dtype=torch.int32, device=DEVICE)
    budgets = torch.tensor([64], device=DEVICE)
    with pytest.raises(ValueError, match="32769"):
        select(bed._replace(table_BM=wide_BM), kernels, budgets)


def test_what_cannot_be_compiled_is_refused() -> None:
    def halves(keys, values):
        return {"x": keys.reshape(8, 2 * keys.shape[1]).mean(0)}

    def quarters(keys, values):
        return {"x": keys.reshape(4, 4, keys.shape[1]).mean(1)}

    cases = (as_keys(2 * D), halves, "powers"), (int4(P // 4, D), quarters, "int4")
    for form, summarise, word in cases:
        fields, score = {"x": form}, lambda query, fields, position: fields.x.sum()
        odd = Flow(name="odd", fields=fields, summarise=summarise, score=score)
        with pytest.raises(FlowError, match=word):
            Compiled(trace(odd, 16, 24, 2), torch.float16)
