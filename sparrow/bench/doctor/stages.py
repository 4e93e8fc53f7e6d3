"""What may break, looked at for real: torch, its GPUs, models, memory, a self-test, kernels.

These run in a process of their own (`examination.probe`), so that a stage may fail in any way. Its
imports wait for it: what breaks there is then told from what breaks earlier.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any

from sparrow.bench.doctor import host

Found = dict[str, Any]
LEAST_CAPABILITY = (8, 0)  # that our kernels are written for: it has bf16
LENGTH = 8192  # tokens of the sequence that should fit
FILES = ("config.json", "tokenizer.json")
PROMPT = "countdown 23 25 47 reach 94 <think>"
TOKENS, BUDGET = 24, 256  # the budget holds the prompt and all new tokens
ALLOWED = {"float32": 1e-4, "bfloat16": 2e-2}  # errors of attention over standard normals


def run(stages: list[str]) -> None:
    """The process: every stage in its order, a JSON line each as it ends."""
    found: Found = {}
    for stage in stages:
        found[stage] = WORK[stage](found)
        print(json.dumps({"stage": stage, "found": found[stage]}), flush=True)


def torch_build(_: Found) -> Found:
    """Which torch this is, how many threads it uses, and why it can use no GPU (None: it can)."""
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    why = None if usable else str(said[0].message) if said else "torch sees none"
    threads = torch.get_num_threads()
    return {"version": torch.__version__, "build": build, "threads": threads, "no_gpu": why}


def gpus(found: Found) -> list[Found]:
    """The GPUs that torch can use."""
    import torch

    seen = []
    for index in range(torch.cuda.device_count() if found["torch"]["no_gpu"] is None else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        seen.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "total": total,
                "free": free,
                "capability": ".".join(map(str, capability)),
                "driver": host.driver(),
                "kernels": torch.version.hip is None and capability >= LEAST_CAPABILITY,
            }
        )
    return seen


def models(_: Found) -> Found:
    """Models that load without a network, and where fetched ones are kept."""
    from sparrow.models import shipped
    from sparrow.models.fetch import cache_dir, fetched, known
    from sparrow.models.sources import SHIPPED

    return {
        "shipped": [_model(name, SHIPPED / name) for name in shipped()],
        "fetched": [_model(name, fetched(name)) for name in known()],
        "cache": str(cache_dir()),
    }


def _model(name: str, folder: Path | None) -> Found:
    """Whether the files are there; they are not read."""
    if folder is None:
        return {"name": name, "folder": None, "whole": False, "bytes": 0}
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    whole = all((folder / each).is_file() for each in FILES) and sum(weights) > 0
    return {"name": name, "folder": str(folder), "whole": whole, "bytes": sum(weights)}


def fits(found: Found) -> list[Found]:
    """The largest published shapes that memory holds with one sequence of 8192 tokens."""
    from sparrow.engine.memory import CPU_SHARE

    here = host.memory()
    room, total = here["available"] or here["total"] or 0, here["total"] or 0
    own = [largest("cpu", room, kv=int(total * CPU_SHARE))]
    return own + [largest(f"cuda:{gpu['index']}", gpu["free"]) for gpu in found["gpus"]]


def largest(device: str, room: int, kv: int | None = None) -> Found:
    """By bytes alone; `kv` is what an engine would take for keys and values at most.

    Training takes micro-batches of one sequence, with recompute; the engine sleeps while weights
    change.
    """
    from sparrow.models.spec import SHAPES
    from sparrow.train.costs import trainer_memory

    gpu, item = device != "cpu", 2 if device != "cpu" else 4
    runs, trains = None, None
    for name, spec in sorted(SHAPES.items(), key=lambda pair: pair[1].parameters()):
        keys = 2 * spec.layers * spec.kv_heads * spec.head_size * item * LENGTH
        rollout = item * spec.parameters() + keys
        if rollout > room or (kv is not None and keys > kv):
            continue
        sizes: Found = {"tokens": LENGTH, "longest": LENGTH, "item": item, "gpu": gpu}
        needs = trainer_memory(spec, recompute=True, **sizes)
        runs = name
        trains = name if max(needs.total, needs.resident + rollout) <= room else trains
    return {"device": device, "bytes": room, "tokens": LENGTH, "rollout": runs, "train": trains}


def self_test(_: Found) -> Found:
    """tiny answers a puzzle dense, and with a budget of the length: by rule the same bits."""
    from sparrow.engine import Engine
    from sparrow.models import load, load_tokenizer
    from sparrow.schema.sampling import SamplingParams
    from sparrow.schema.schedule import Schedule
    from sparrow.sparse.rule import Rule

    start = time.perf_counter()
    prompt = list(load_tokenizer("tiny")(PROMPT)["input_ids"])
    rule = Rule(dense_layers=frozenset())
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


def kernels(found: Found) -> list[Found]:
    """Decode attention on the CPU and on every GPU that has kernels, against its definition."""
    named = [f"cuda:{gpu['index']}" for gpu in found["gpus"] if gpu["kernels"]]
    return [attention("float32", "cpu"), *(attention("bfloat16", name) for name in named)]


def attention(dtype: str, device: str) -> Found:
    """The version of decode attention that runs on a device, and its greatest error."""
    import torch

    from sparrow import ops

    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)
    q_BHD = torch.randn(2, 4, 64, generator=draw).to(kind)
    k_NGPD, v_NGPD = (torch.randn(6, 2, 16, 64, generator=draw).to(kind) for _ in range(2))
    table_BM, lengths_B = torch.arange(6).reshape(2, 3), torch.tensor([40, 7])
    with ops.using("reference"):
        wide = (q_BHD.float(), k_NGPD.float(), v_NGPD.float(), table_BM, lengths_B)
        exact = ops.attend_decode(*wide, scale=0.125)
    given = [each.to(device) for each in (q_BHD, k_NGPD, v_NGPD, table_BM, lengths_B)]
    found = ops.attend_decode(given[0], given[1], given[2], given[3], given[4], scale=0.125)
    error = float((found.cpu().float() - exact).abs().nan_to_num(torch.inf).max())
    version = ops.versions(torch.device(device).type, kind, 64).get("attend_decode", "definition")
    return {
        "device": device,
        "version": version,
        "error": error,
        "passed": error <= ALLOWED[dtype],
    }


WORK = {
    "torch": torch_build,
    "gpus": gpus,
    "models": models,
    "fits": fits,
    "self_test": self_test,
    "kernels": kernels,
}
