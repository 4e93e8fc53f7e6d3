"""What a newcomer with bad luck ran into: each was wrong once."""

import copy
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.flows import mean_flow

from sparrow import models
from sparrow.calibration.planning.cost import ByteModel
from sparrow.engine import Engine
from sparrow.models.spec import shape
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.compile import kernels
from sparrow.sparse.flows import D, Flow, FlowError, bf16, interpret, library, weights
from sparrow.sparse.flows.flow import check_weights, trace
from sparrow.sparse.flows.interpret import ScoreContext
from sparrow.sparse.flows.tensor import softmax_over_pages
from sparrow.sparse.rule import Rule


def test_names_of_fields_do_not_hide_how_they_are_used() -> None:
    def digest(field: str, among: str) -> str:
        score = lambda q, f, p: softmax_over_pages(q @ f[field], among=among).sum()  # noqa: E731
        return trace(mean_flow(field, score, field=field), 16, 64, 2).digest

    finished = digest("finished", "finished")
    assert digest("free", "free") != finished
    assert finished == digest("mean", "finished")


def test_weights_of_another_model_are_refused_when_an_engine_is_built() -> None:
    ones = np.ones((2, 4, 64, 2))
    score = lambda q, f, p: q.mean(0) @ f.mean + (q @ weights(ones)).sum()  # noqa: E731
    learned = mean_flow("learned", score, probe=(16, 64, 1))
    program = trace(learned, 16, 64, 1)
    check_weights(program, layers=2, kv_heads=4)
    with pytest.raises(FlowError, match="KV heads"):
        check_weights(program, layers=3, kv_heads=4)
    given = (torch.zeros(1, 4, 64), {"mean": torch.zeros(2, 4, 64)})
    with pytest.raises(FlowError, match=rf"^{re.escape(__file__)}:\d+: .*KV heads"):
        interpret.score(program, *given, ScoreContext(lengths=torch.tensor([32]), layer=2), pages=2)
    sizes = {"layers": 2, "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 2}
    model = models.random("qwen3-0.6b", **sizes, head_size=64, vocabulary=99, max_positions=64)
    with pytest.raises(FlowError, match="KV heads"):
        Engine(model, rule=Rule(flow=learned))
    with pytest.raises(ValueError, match="Rule"):
        Engine(model, rule=library.quest)
    with pytest.raises(ValueError, match="Flow"):
        Rule(flow="quest")
    assert Rule(dense_layers=[0, 2]).dense_layers == {0, 2}


def test_flows_can_be_copied_and_sent() -> None:
    for again in (copy.deepcopy(library.quest), pickle.loads(pickle.dumps(library.quest))):
        assert trace(again, 16, 64, 2).digest == trace(library.quest, 16, 64, 2).digest


def test_formulas_too_deep_are_refused_by_the_compiler_only() -> None:
    def deep(query, fields, position):
        x = query.mean(0) @ fields.mean
        for _ in range(1500):
            x = x + 1.0
        return x

    with pytest.raises(FlowError, match="depth"):
        kernels.module(trace(mean_flow("deep", deep), 16, 64, 2), torch.bfloat16, block=16)


def test_fields_larger_than_the_page_are_refused() -> None:
    fields = {"all": bf16(10**7, D)}
    with pytest.raises(FlowError, match=r"test_flow_attacks.*bytes"):
        Flow(name="huge", fields=fields, summarise=lambda k, v: {"all": k}, score=lambda *_: None)


def test_a_model_that_cannot_read_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "sparrow", "flow", "score", "quest", "-m", "tiny"]
    done = subprocess.run([*command, "--tokens", "64", "-b", "48"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot read the text" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_bytes_count_budgets_by_head_and_ask_for_those_of_other_flows() -> None:
    spec = shape("qwen3-0.6b")
    own = [LayerBudgets(layer=2, budgets=[64], head=head) for head in range(spec.kv_heads)]
    plain = ByteModel(spec=spec, schedule=Schedule.fixed(1024)).step([8192]).kept
    fewer = ByteModel(spec=spec, schedule=Schedule.fixed(1024, layers=own)).step([8192]).kept
    vector = 2 * spec.kv_heads * spec.head_size * 2
    assert plain - fewer == (1024 - 64) * vector
    with pytest.raises(ValueError, match="field_bytes"):
        ByteModel(spec=spec, schedule=Schedule.fixed(1024, flow="fine-means-2"))
