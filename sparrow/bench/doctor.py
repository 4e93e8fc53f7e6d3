"""What is on this machine, what works and what is missing, behind `sparrow doctor`.

A broken installation fails in ways that no `except` can list, crashes included. So what may break
runs in a child, stage by stage, which prints a line as each stage ends. Where lines are missing,
the first stage without one is what broke, and the child's last words say how. Imports of a stage
wait for it: what breaks there is then told from what breaks earlier.

The table of packages repeats pyproject.toml (a test compares them), because a checkout that is used
without being installed has no metadata.
"""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sparrow import __version__

PROC = Path("/proc")
BROWSER = "browser"  # its package needs a browser beside it
CHECKS = ("self_test", "kernels")
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child sees the modules that this process sees, in the same order.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.bench.doctor import run_stages; run_stages(json.loads(sys.argv[2]))"
)
REPORT = "install into a fresh environment; if it stays, report it with sparrow doctor --json"
BREAKS = {
    "torch": "torch does not load",
    "gpus": "torch cannot talk to the GPUs",
    "models": "the package does not load",
    "self_test": "the self-test broke",
    "kernels": "the kernels broke",
}
LEAST_CAPABILITY = (8, 0)  # that our kernels are written for: it has bf16
FILES = ("config.json", "tokenizer.json")
PROMPT = "countdown 23 25 47 reach 94 <think>"
TOKENS, BUDGET = 24, 256  # the budget holds the prompt and all new tokens
ALLOWED = {"float32": 1e-4, "bfloat16": 2e-2}  # errors of attention over standard normals

Found = Mapping[str, Any]  # what is known so far, by its keys
Advice = tuple[str, str]  # what is wrong or missing, and how to mend it


def examine(*, check: bool = True) -> dict[str, Any]:
    """What is here, what works, what is missing and how to get it. Uses no network.

    Keys: sparrow, python, platform, executable (this Python); packages (name, version, minimum,
    state: ok, old or missing, extra: None is core, purpose, install); driver (NVIDIA's); cores;
    torch (version, build, threads, no_gpu: why, or None); gpus (index, name, total, free,
    capability, kernels); models (shipped, fetched, cache, memory: bytes of this host); self_test
    (passed, tokens, seconds); kernels (device, version, error, passed); broken (stage, why); and
    the verdict: ready, devices, problems and missing (what, how). Sizes are bytes. What
    a stage that broke or was not wanted would have told is None.
    """
    found: dict[str, Any] = {
        "sparrow": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "packages": [package_state(own, installed(own.name)) for own in (*CORE, *OPTIONAL)],
        "cores": os.cpu_count(),
        "driver": driver(),
        **dict.fromkeys(STAGES),
        **probe([stage for stage in STAGES if check or stage not in CHECKS]),
    }
    return found | verdict(found, check=check)


def probe(stages: list[str], timeout: float = TIMEOUT) -> dict[str, Any]:
    """What each stage found, run in a child, and which one is `broken`, if any."""
    command = [sys.executable, "-P", "-c", CHILD, json.dumps(sys.path), json.dumps(stages)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        child = subprocess.run(command, capture_output=True, env=environment, timeout=timeout)
        said = child.stdout.decode(errors="replace")
        why = last_words(child.stderr.decode(errors="replace"), child.returncode)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        why = f"no end within {timeout:g} s"
    found: dict[str, Any] = {}
    for line in said.splitlines(keepends=True):  # whole ones; libraries may print others between
        if line.startswith('{"stage": ') and line.endswith("\n"):
            told = json.loads(line)
            found[told["stage"]] = told["found"]
    missing = next((stage for stage in stages if stage not in found), None)
    return found | {"broken": None if missing is None else {"stage": missing, "why": why}}


def last_words(errors: str, code: int) -> str:
    """How the child ended, in one line: its error, or the signal that killed it."""
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {code}"


# The verdict.


def verdict(found: Found, *, check: bool) -> dict[str, Any]:
    """Whether the core works, on which devices and for what; what to mend, what to add.

    `problems` keep the core from working. `missing` things would add something.
    """
    problems, missing = (
        [{"what": what, "how": how} for what, how in advice]
        for advice in (_problems(found), _missing(found))
    )
    return {
        "ready": not problems,
        "devices": [] if problems else ["cpu", *_good_gpus(found, check)],
        "problems": problems,
        "missing": missing,
    }


def _problems(found: Found) -> Iterator[Advice]:
    yield from _packages(found, core=True)
    broken = found["broken"]
    if broken is not None and not _only_gpus_broke(found):
        again = f"{beside('pip')} install --force-reinstall torch"
        how = again if broken["stage"] == "torch" else REPORT
        yield f"{BREAKS[broken['stage']]}: {broken['why']}", how
    for model in (found["models"] or {}).get("shipped", ()):
        if not model["whole"]:
            yield f"the shipped model {model['name']} lacks files: {model['folder']}", REPORT
    if found["self_test"] is not None and not found["self_test"]["passed"]:
        failed = "the self-test failed: keeping every token, tiny answers otherwise than dense"
        yield failed, REPORT
    yield from _wrong_kernels(found, on_cpu=True)


def _missing(found: Found) -> Iterator[Advice]:
    yield from _packages(found, core=False)
    for model in (found["models"] or {}).get("fetched", ()):
        if not model["whole"]:
            state, force = ("damaged", " --force") if model["folder"] else ("not fetched", "")
            what = f"{model['name']}, a real model: {state}"
            yield what, f"sparrow fetch {model['name']}{force}"
    torch, gpus = found["torch"], found["gpus"] or ()
    if torch is not None and not gpus and found["driver"] is not None:
        if torch["build"] == "CPU":
            what = "a GPU: NVIDIA's driver is here, but this torch is built for a CPU"
            yield what, "torch for CUDA, by the command of https://pytorch.org"
        else:
            yield f"a GPU: {torch['no_gpu']}", "look at nvidia-smi"
    if _only_gpus_broke(found):
        yield f"{BREAKS['kernels']} on a GPU: {found['broken']['why']}", REPORT
    for gpu in gpus:
        if not gpu["kernels"]:
            has, least = gpu["capability"], ".".join(map(str, LEAST_CAPABILITY))
            what = f"compute capability {has}, our kernels want {least} by NVIDIA"
            yield f"cuda:{gpu['index']}: {what}", "--device cpu, or another GPU"
    yield from _wrong_kernels(found, on_cpu=False)


def _packages(found: Found, *, core: bool) -> Iterator[Advice]:
    """Packages that are not as they should be; triton counts where there is a GPU."""
    for package in found["packages"]:
        counts = package["name"] != "triton" or found["gpus"]
        if (package["extra"] is None) != core or package["state"] == "ok" or not counts:
            continue
        state = f"{package['name']} {package['version']} is older than {package['minimum']}"
        if package["state"] == "missing":
            state = f"{package['name']} is not installed"
        yield f"{package['purpose']}: {state}", package["install"]


def _wrong_kernels(found: Found, *, on_cpu: bool) -> Iterator[Advice]:
    for kernel in found["kernels"] or ():
        if (kernel["device"] == "cpu") == on_cpu and not kernel["passed"]:
            where = "the CPU" if on_cpu else kernel["device"]
            yield f"attention on {where} is wrong by {kernel['error']:.3g}", REPORT


def _only_gpus_broke(found: Found) -> bool:
    """Kernels of the CPU run in the self-test too, and that went through."""
    broken = found["broken"]
    return broken is not None and broken["stage"] == "kernels" and bool(found["gpus"])


def _good_gpus(found: Found, check: bool) -> list[str]:
    """GPUs whose kernels were right or, where nothing was checked, are written for them."""
    able = [f"cuda:{gpu['index']}" for gpu in found["gpus"] or () if gpu["kernels"]]
    right = [
        kernel["device"]
        for kernel in found["kernels"] or ()
        if kernel["passed"] and kernel["version"] != "definition"
    ]
    return [device for device in able if device in right or not check]


# Packages.


class Package(NamedTuple):
    """A package that something needs: everything (`extra` None), or what `purpose` says."""

    name: str
    minimum: str
    purpose: str
    extra: str | None = None


CORE = (
    Package("torch", "2.11", "tensors, training, GPUs"),
    Package("numpy", "1.26", "records"),
    Package("scipy", "1.12", "intervals and fits"),
    Package("numba", "0.61", "kernels for a CPU"),
    Package("safetensors", "0.5", "weights"),
    Package("transformers", "5.0", "tokenizers"),
    Package("gguf", "0.17", "sparrow fetch"),
    Package("pydantic", "2.7", "configurations"),
    Package("tomli-w", "1.0", "configurations"),
    Package("rich", "13", "the command line"),
    Package("jinja2", "3.1", "pages of sparrow report"),
    Package("tensorboard", "2.16", "curves of training"),
)
OPTIONAL = (
    Package("triton", "3.6", "kernels for a GPU; torch for CUDA brings it along", "kernels"),
    Package("math-verify", "0.8", "judging answers in mathematics", "math"),
    Package("pyarrow", "18", "rows from .parquet files", "parquet"),
    Package("reasoning-gym", "0.1.25", "tasks gym/NAME", "gym"),
    Package("playwright", "1.50", "testing reports in a browser", BROWSER),
)


def package_state(package: Package, version: str | None) -> dict[str, Any]:
    """A package of which this version is here: ok, old or missing, and what installs it."""
    state = "missing" if version is None else "ok"
    if version is not None and _numbers(version) < _numbers(package.minimum):
        state = "old"
    install = f"{beside('pip')} install '{package.name}>={package.minimum}'"
    if package.extra == BROWSER:
        install += f" && {beside('playwright')} install chromium"
    return package._asdict() | {"version": version, "state": state, "install": install}


def installed(name: str) -> str | None:
    """The version that the metadata says; None: not installed. Unreadable metadata is "0"."""
    try:
        return version(name) or "0"
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """The numbers that a version starts with, without zeros at the end: 2.13.0+cpu is 2.13."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in re.sub(r"(\.0)+$", "", found[0]).split(".")] if found else []


def beside(program: str) -> str:
    """How to call a program of this Python's environment, also one that is still to come.

    By its name where the shell finds this environment's pip.
    """
    pip = shutil.which("pip")
    active = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return program if active else f"{sys.executable} -m {program}"


def driver(proc: Path = PROC) -> str | None:
    """The version of NVIDIA's driver; None: there is none, or it does not tell."""
    file = proc / "driver/nvidia/version"
    first = file.read_text(errors="replace").partition("\n")[0] if file.is_file() else ""
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{first} ")
    return found[1] if found else None


# Stages, in the child.


def run_stages(stages: list[str]) -> None:
    """The process: every stage in its order, a JSON line each as it ends."""
    found: dict[str, Any] = {}
    for stage in stages:
        found[stage] = STAGES[stage](found)
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

    seen: list[Found] = []
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
                "kernels": torch.version.hip is None and capability >= LEAST_CAPABILITY,
            }
        )
    return seen


def models(_: Found) -> Found:
    """Models that load without a network, where fetched ones are kept, and room for them."""
    from sparrow.engine.memory import host_memory
    from sparrow.models import shipped
    from sparrow.models.fetch import cache_dir, fetched, known
    from sparrow.models.sources import SHIPPED

    return {
        "shipped": [_model(name, SHIPPED / name) for name in shipped()],
        "fetched": [_model(name, fetched(name)) for name in known()],
        "cache": str(cache_dir()),
        "memory": host_memory(),
    }


def _model(name: str, folder: Path | None) -> Found:
    """Whether the files are there; they are not read."""
    if folder is None:
        return {"name": name, "folder": None, "whole": False, "bytes": 0}
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    whole = all((folder / each).is_file() for each in FILES) and sum(weights) > 0
    return {"name": name, "folder": str(folder), "whole": whole, "bytes": sum(weights)}


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


STAGES = {
    "torch": torch_build,
    "gpus": gpus,
    "models": models,
    "self_test": self_test,
    "kernels": kernels,
}
