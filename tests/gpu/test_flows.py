"""Flows on a GPU: kernels against their meaning in bf16 and fp16, in graphs, through the engine."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from support.flows import LAYER, LIBRARY, ODD, ON_GPU, make_bed, same_fields
from support.kernels import check_choice, fill_fields

from sparrow import models
from sparrow.benchmarks.timing import captured
from sparrow.engine import Engine
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.compile.launch import Compiled
from sparrow.sparse.flows import FlowError, library
from sparrow.sparse.rule import Rule

FLOWS = [*LIBRARY, *ODD, *ON_GPU]
LENGTHS = [1, 16, 100, 999, 48, 5000, 2048, 16 * 128]
BUDGETS = [48, 48, 80, 512, 48, 640, 2048, 2**31 - 1]


def bed_of(flow, dtype=torch.bfloat16, **shape):
    return make_bed(flow, LENGTHS, dtype=dtype, device="cuda", **{"size": 128, "group": 2} | shape)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
@pytest.mark.parametrize(
    ("dtype", "size", "group"),
    [(torch.bfloat16, 128, 2), (torch.float16, 64, 5)],
    ids=["bf16", "fp16, group 5"],
)
def test_kernels_mean_what_the_flow_means(flow, dtype, size, group) -> None:
    bed = bed_of(flow, dtype, size=size, group=group)
    kernels = Compiled(bed.program, dtype)
    fill_fields(bed, kernels)
    same_fields(bed, 0.02)
    for field in bed.compiled.page_fields:  # the same from here on: only the choice is compared
        bed.compiled.field(field.name, LAYER).copy_(bed.defined.field(field.name, LAYER))
    for _ in range(2):
        check_choice(bed, kernels, torch.tensor(BUDGETS, device="cuda"), tolerance=0.02)


@pytest.mark.parametrize(
    "flow", [library.fine_means(4), library.running_average(0.5)], ids=lambda flow: flow.name
)
def test_a_graph_replays_what_eager_calls_give(flow) -> None:
    bed = bed_of(flow)
    bed.rule.summarise(bed.compiled, LAYER, bed.slots_T)
    budgets = torch.tensor(BUDGETS, device="cuda")
    rule = Rule(flow=flow, dense_layers=frozenset())
    given = (bed.q_BHD, bed.table_BM, bed.lengths_B, budgets, bed.rows_B)
    kept = {}

    def select() -> None:
        kept["lists"] = rule.select(bed.compiled, LAYER, *given)

    def begin() -> None:
        for row in range(len(LENGTHS)):
            bed.compiled.begin(row)

    replay = captured(select, torch.device("cuda"))
    begin()
    replay()
    torch.cuda.synchronize()
    replayed = [part.clone() for part in kept["lists"]]
    begin()
    select()
    assert all(torch.equal(a, b) for a, b in zip(replayed, kept["lists"], strict=True))


@pytest.mark.parametrize(
    "flow",
    [
        *(library.fine_means(4), library.softmax_sum, library.running_average(0.5)),
        *(library.window, replace(library.quest, layers=2)),
    ],
    ids=lambda flow: flow.name,
)
def test_the_engine_runs_flows_in_graphs(flow) -> None:
    """And a budget of the length is dense, bit for bit."""
    sizes = {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4}
    sizes |= {"head_size": 64, "vocabulary": 1009, "max_positions": 4096}
    model = models.random("qwen3-0.6b", **sizes, dtype=torch.bfloat16, device="cuda")
    rule = Rule(flow=flow, dense_layers=frozenset((0,)))
    # Without reuse every call computes its prompts in the same pieces, and so to the same bits.
    engine = Engine(model, rule=rule, max_running=16, max_context=1024, reuse="none")
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    prompts = [list(range(5, 205)), list(range(3, 60))]

    def tokens(schedule):
        return [c.token_ids.tolist() for c in engine.generate(prompts, params, schedule=schedule)]

    same = {"flow": flow.name, "dense_layers": (0,)}
    assert tokens(Schedule.fixed(4096, **same)) == tokens(None)
    assert tokens(Schedule.fixed(64, **same)) == tokens(Schedule.fixed(64, **same))


def test_what_has_no_kernel_is_refused_when_the_engine_is_built() -> None:
    given = {"page": 16, "group": 2, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    given |= {"layers": 2, "kv_heads": 2}
    Rule(flow=library.sub_quest(4)).prepare(head_size=128, **given)
    with pytest.raises(FlowError, match="powers"):
        Rule(flow=library.fine_means(4)).prepare(head_size=96, **given)
