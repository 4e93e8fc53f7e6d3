"""What only the package itself can tell: each stage looks at one thing, for real.

These run in a process of their own (see probe.py), so that a stage may fail in any way.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparrow import ops
from sparrow.bench.doctor.host import memory
from sparrow.engine.memory import CPU_SHARE
from sparrow.models import load, load_tokenizer, shipped
from sparrow.models.fetch import cache_dir, fetched, known
from sparrow.models.sources import SHIPPED
from sparrow.models.spec import SHAPES, ModelSpec
from sparrow.train.costs import trainer_memory

LENGTH = 8192  # tokens of the sequence that should fit
FILES = ("config.json", "tokenizer.json")
PROMPT = "countdown 23 25 47 reach 94 <think>"
TOKENS, BUDGET = 24, 256  # the budget holds the prompt and all new tokens
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # errors of attention over standard normals


def models() -> dict[str, Any]:
    """Models that load without a network, and where fetched ones are kept."""
    own = [_model(name, SHIPPED / name) for name in shipped()]
    return {
        "shipped": own,
        "fetched": [_model(name, fetched(name)) for name in known()],
        "cache": str(cache_dir()),
    }


def _model(name: str, folder: Path | None) -> dict[str, Any]:
    """Whether the files are there; they are not read."""
    if folder is None:
        return {"name": name, "folder": None, "whole": False, "bytes": 0}
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    whole = all((folder / each).is_file() for each in FILES) and sum(weights) > 0
    return {"name": name, "folder": str(folder), "whole": whole, "bytes": sum(weights)}


def fits(devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest published shapes that memory holds with one sequence of 8192 tokens."""
    here = memory()
    room, total = here["available"] or here["total"] or 0, here["total"] or 0
    found = [_largest("cpu", room, kv=int(total * CPU_SHARE))]
    return found + [_largest(f"cuda:{gpu['index']}", gpu["free"]) for gpu in devices]


def _largest(device: str, room: int, kv: int | None = None) -> dict[str, Any]:
    """By bytes alone; `kv` is what an engine would take for keys and values at most."""
    gpu, item = device != "cpu", 2 if device != "cpu" else 4
    runs, trains = None, None
    for name, spec in sorted(SHAPES.items(), key=lambda pair: pair[1].parameters()):
        keys = 2 * spec.layers * spec.kv_heads * spec.head_size * item * LENGTH
        rollout = item * spec.parameters() + keys
        if rollout > room or (kv is not None and keys > kv):
            continue
        runs = name
        trains = name if _training_bytes(spec, rollout, item, gpu) <= room else trains
    return {"device": device, "bytes": room, "tokens": LENGTH, "rollout": runs, "train": trains}


def _training_bytes(spec: ModelSpec, rollout: int, item: int, gpu: bool) -> int:
    """Micro-batches of one sequence, with recompute; the engine sleeps while weights change."""
    needs = trainer_memory(spec, tokens=LENGTH, longest=LENGTH, item=item, recompute=True, gpu=gpu)
    return max(needs.total, needs.resident + rollout)


def self_test() -> dict[str, Any]:
    """tiny answers a puzzle dense, and with a budget of the length: by rule the same bits."""
    from sparrow.engine import Engine
    from sparrow.schema.sampling import SamplingParams
    from sparrow.schema.schedule import Schedule
    from sparrow.sparse.flows.library import block_mean
    from sparrow.sparse.rule import Rule

    start = time.perf_counter()
    prompt = list(load_tokenizer("tiny")(PROMPT)["input_ids"])
    rule = Rule(flow=block_mean, dense_layers=frozenset())
    engine = Engine(load("tiny", device="cpu"), rule=rule, max_context=BUDGET)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    (dense,) = engine.generate([prompt], params)
    (sparse,) = engine.generate([prompt], params, schedule=Schedule.fixed(BUDGET, dense_layers=()))
    equal = all(
        getattr(dense, name).tobytes() == getattr(sparse, name).tobytes()
        for name in ("token_ids", "logprobs")
    )
    passed = equal and len(dense.token_ids) == TOKENS
    return {"passed": passed, "tokens": TOKENS, "seconds": time.perf_counter() - start}


def kernels(devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decode attention on the CPU and on every GPU that has kernels, against its definition."""
    named = [f"cuda:{gpu['index']}" for gpu in devices if gpu["kernels"]]
    return [attention(torch.float32, "cpu"), *(attention(torch.bfloat16, name) for name in named)]


def attention(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The version of decode attention that runs on a device, and its greatest error."""
    draw = torch.Generator().manual_seed(0)
    q_BHD = torch.randn(2, 4, 64, generator=draw).to(dtype)
    k_NGPD, v_NGPD = (torch.randn(6, 2, 16, 64, generator=draw).to(dtype) for _ in range(2))
    table_BM, lengths_B = torch.arange(6).reshape(2, 3), torch.tensor([40, 7])
    with ops.using("reference"):
        wide = (q_BHD.float(), k_NGPD.float(), v_NGPD.float(), table_BM, lengths_B)
        exact = ops.attend_decode(*wide, scale=0.125)
    given = [each.to(device) for each in (q_BHD, k_NGPD, v_NGPD, table_BM, lengths_B)]
    found = ops.attend_decode(given[0], given[1], given[2], given[3], given[4], scale=0.125)
    error = float((found.cpu().float() - exact).abs().nan_to_num(torch.inf).max())
    runs = ops.versions(torch.device(device).type, dtype, 64)
    return {
        "device": device,
        "version": runs.get("attend_decode", "definition"),
        "error": error,
        "passed": error <= ALLOWED[dtype],
    }
