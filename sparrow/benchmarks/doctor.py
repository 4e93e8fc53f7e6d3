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
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import to_jsonable_python

from sparrow import __version__
from sparrow.schema.doctor import (
    Advice,
    Broken,
    Disk,
    Examination,
    Gpu,
    KernelTest,
    LargestModels,
    ModelState,
    ModelStates,
    PackageState,
    SelfTest,
    TorchBuild,
)

PROC = Path("/proc")
BROWSER = "browser"  # its package needs a browser beside it
CHECKS = ("self_test", "kernels")
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child sees the modules that this process sees, in the same order.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.benchmarks.doctor import run_stages; run_stages(json.loads(sys.argv[2]))"
)
REPORT = "install into a fresh environment; if it stays, report it with sparrow doctor --json"
BREAKS = {
    "torch": "torch does not load",
    "gpus": "torch cannot talk to the GPUs",
    "models": "the package does not load",
    "fits": "the memory of models cannot be computed",
    "self_test": "the self-test broke",
    "kernels": "the kernels broke",
}
LEAST_CAPABILITY = (8, 0)  # that our kernels are written for: it has bf16
LENGTH = 8192  # tokens of the sequence that has to fit beside a model
FILES = ("config.json", "tokenizer.json")
PROMPT = "countdown 23 25 47 reach 94 <think>"
TOKENS, BUDGET = 24, 256  # the budget holds the prompt and all new tokens
ALLOWED = {"float32": 1e-4, "bfloat16": 2e-2}  # errors of attention over standard normals


def examine(*, check: bool = True) -> Examination:
    """What is here, what works, what is missing and how to get it. Uses no network."""
    found = Examination(
        sparrow=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        executable=sys.executable,
        packages=tuple(package_state(own, installed(own.name)) for own in (*CORE, *OPTIONAL)),
        cores=os.cpu_count(),
        driver=driver(),
        **probe([stage for stage in STAGES if check or stage not in CHECKS]),
    )
    return verdict(found, check=check)


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
    return found if missing is None else found | {"broken": Broken(stage=missing, why=why)}


def last_words(errors: str, code: int) -> str:
    """How the child ended, in one line: its error, or the signal that killed it."""
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {code}"


# The verdict.


def verdict(found: Examination, *, check: bool) -> Examination:
    """Whether the core works, and on which devices; what to mend, what to add."""
    problems, missing = tuple(_problems(found)), tuple(_missing(found))
    devices = () if problems else ("cpu", *_good_gpus(found, check))
    return found.replace(ready=not problems, devices=devices, problems=problems, missing=missing)


def _problems(found: Examination) -> Iterator[Advice]:
    yield from _packages(found, core=True)
    broken = found.broken
    if broken is not None and not _only_gpus_broke(found):
        again = f"{beside('pip')} install --force-reinstall torch"
        how = again if broken.stage == "torch" else REPORT
        yield Advice(what=f"{BREAKS[broken.stage]}: {broken.why}", how=how)
    for model in found.models.shipped if found.models else ():
        if not model.whole:
            what = f"the shipped model {model.name} lacks files: {model.folder}"
            yield Advice(what=what, how=REPORT)
    if found.self_test is not None and not found.self_test.passed:
        failed = "the self-test failed: keeping every token, tiny answers otherwise than dense"
        yield Advice(what=failed, how=REPORT)
    yield from _wrong_kernels(found, on_cpu=True)


def _missing(found: Examination) -> Iterator[Advice]:
    yield from _packages(found, core=False)
    if found.models is not None:
        yield from _models_and_disk(found.models)
    torch, gpus = found.torch, found.gpus or ()
    if torch is not None and not gpus and found.driver is not None:
        what, how = f"a GPU: {torch.no_gpu}", "look at nvidia-smi"
        if torch.build == "CPU":
            what = "a GPU: NVIDIA's driver is here, but this torch is built for a CPU"
            how = "torch for CUDA, by the command of https://pytorch.org"
        yield Advice(what=what, how=how)
    if found.broken is not None and _only_gpus_broke(found):
        yield Advice(what=f"{BREAKS['kernels']} on a GPU: {found.broken.why}", how=REPORT)
    for gpu in gpus:
        if not gpu.kernels:
            least = ".".join(map(str, LEAST_CAPABILITY))
            what = f"compute capability {gpu.capability}, our kernels want {least} by NVIDIA"
            yield Advice(what=f"cuda:{gpu.index}: {what}", how="--device cpu, or another GPU")
    yield from _wrong_kernels(found, on_cpu=False)


def _models_and_disk(here: ModelStates) -> Iterator[Advice]:
    for model in here.fetched:
        if not model.whole:
            state, force = ("damaged", " --force") if model.folder else ("not fetched", "")
            how = f"sparrow fetch {model.name}{force}"
            yield Advice(what=f"{model.name}, a real model: {state}", how=how)
    if not here.runs.writable:
        what = f"runs cannot be written to {here.runs.folder}"
        yield Advice(what=what, how="work in another folder")


def _packages(found: Examination, *, core: bool) -> Iterator[Advice]:
    """Packages that are not as they should be; triton counts where there is a GPU."""
    for package in found.packages:
        counts = package.name != "triton" or found.gpus
        if (package.extra is None) != core or package.state == "ok" or not counts:
            continue
        state = f"{package.name} {package.version} is older than {package.minimum}"
        if package.state == "missing":
            state = f"{package.name} is not installed"
        yield Advice(what=f"{package.purpose}: {state}", how=package.install)


def _wrong_kernels(found: Examination, *, on_cpu: bool) -> Iterator[Advice]:
    for kernel in found.kernels or ():
        if (kernel.device == "cpu") == on_cpu and not kernel.passed:
            where = "the CPU" if on_cpu else kernel.device
            yield Advice(what=f"attention on {where} is wrong by {kernel.error:.3g}", how=REPORT)


def _only_gpus_broke(found: Examination) -> bool:
    """Kernels of the CPU run in the self-test too, and that went through."""
    broken = found.broken
    return broken is not None and broken.stage == "kernels" and bool(found.gpus)


def _good_gpus(found: Examination, check: bool) -> list[str]:
    """GPUs whose kernels were right or, where nothing was checked, are written for them."""
    able = [f"cuda:{gpu.index}" for gpu in found.gpus or () if gpu.kernels]
    right = [
        kernel.device
        for kernel in found.kernels or ()
        if kernel.passed and kernel.version != "definition"
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


def package_state(package: Package, version: str | None) -> PackageState:
    """A package of which this version is here: ok, old or missing, and what installs it."""
    state: Literal["ok", "old", "missing"] = "missing" if version is None else "ok"
    if version is not None and _numbers(version) < _numbers(package.minimum):
        state = "old"
    install = f"{beside('pip')} install '{package.name}>={package.minimum}'"
    if package.extra == BROWSER:
        install += f" && {beside('playwright')} install chromium"
    return PackageState(**package._asdict(), version=version, state=state, install=install)


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
    for stage in stages:
        told = {"stage": stage, "found": to_jsonable_python(STAGES[stage]())}
        print(json.dumps(told), flush=True)


def torch_build() -> TorchBuild:
    """Which torch this is, and what it can use."""
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    why = None if usable else str(said[0].message) if said else "torch sees none"
    threads = torch.get_num_threads()
    return TorchBuild(version=torch.__version__, build=build, threads=threads, no_gpu=why)


def gpus() -> list[Gpu]:
    """The GPUs that torch can use."""
    import torch

    seen = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        seen.append(
            Gpu(
                index=index,
                name=torch.cuda.get_device_name(index),
                total=total,
                free=free,
                capability=".".join(map(str, capability)),
                kernels=torch.version.hip is None and capability >= LEAST_CAPABILITY,
            )
        )
    return seen


def models() -> ModelStates:
    """Models that load without a network, and room for more."""
    from sparrow.engine.memory import host_memory
    from sparrow.models import shipped
    from sparrow.models.fetch import cache_dir, fetched, known
    from sparrow.models.sources import SHIPPED

    return ModelStates(
        shipped=tuple(_model(name, SHIPPED / name) for name in shipped()),
        fetched=tuple(_model(name, fetched(name)) for name in known()),
        cache=disk(cache_dir()),
        runs=disk(Path("runs")),
        memory=host_memory(),
    )


def _model(name: str, folder: Path | None) -> ModelState:
    if folder is None:
        return ModelState(name=name, folder=None, whole=False, bytes=0)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    whole = all((folder / each).is_file() for each in FILES) and weights > 0
    return ModelState(name=name, folder=str(folder), whole=whole, bytes=weights)


def disk(folder: Path) -> Disk:
    """Where a folder is, or will be."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free, writable = shutil.disk_usage(there).free, os.access(there, os.W_OK)
    return Disk(folder=str(folder), free=free, writable=writable)


def fits() -> list[LargestModels]:
    """The largest published models that fit into the memory of the CPU and of every GPU."""
    from sparrow.engine.memory import CPU_SHARE, host_memory

    memory = host_memory()
    on_cpu = largest_models("cpu", memory, kv_limit=int(memory * CPU_SHARE))
    return [on_cpu, *(largest_models(f"cuda:{gpu.index}", gpu.free) for gpu in gpus())]


def largest_models(device: str, memory: int, kv_limit: int | None = None) -> LargestModels:
    """The largest published shapes by bytes: weights and keys and values of one sequence.

    kv_limit: bytes that an engine reserves for keys and values at most. Training takes
    micro-batches of one sequence, with recompute; the engine sleeps while weights change.
    """
    from sparrow.models.spec import SHAPES
    from sparrow.training.costs import trainer_memory

    on_gpu = device != "cpu"
    item = 2 if on_gpu else 4
    rollout = training = None
    for name, spec in sorted(SHAPES.items(), key=lambda pair: pair[1].parameters()):
        kv = 2 * spec.layers * spec.kv_heads * spec.head_size * item * LENGTH
        engine = item * spec.parameters() + kv
        if engine <= memory and (kv_limit is None or kv <= kv_limit):
            learner = trainer_memory(
                spec, tokens=LENGTH, longest=LENGTH, item=item, recompute=True, gpu=on_gpu
            )
            rollout = name
            if max(learner.total, learner.resident + engine) <= memory:
                training = name
    return LargestModels(
        device=device, bytes=memory, tokens=LENGTH, rollout=rollout, training=training
    )


def self_test() -> SelfTest:
    """tiny answers a puzzle dense, and with a budget of the length."""
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
    return SelfTest(passed=passed, tokens=TOKENS, seconds=time.perf_counter() - start)


def kernels() -> list[KernelTest]:
    """Decode attention on the CPU and on every GPU that has kernels, against its definition."""
    named = [f"cuda:{gpu.index}" for gpu in gpus() if gpu.kernels]
    return [attention("float32", "cpu"), *(attention("bfloat16", name) for name in named)]


def attention(dtype: str, device: str) -> KernelTest:
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
    wrong = torch.finfo(torch.float32).max  # what no number is counted as
    error = float((found.cpu().float() - exact).abs().nan_to_num(wrong).max())
    version = ops.versions(torch.device(device).type, kind, 64).get("attend_decode", "definition")
    return KernelTest(device=device, version=version, error=error, passed=error <= ALLOWED[dtype])


STAGES: Mapping[str, Callable[[], Any]] = {
    "torch": torch_build,
    "gpus": gpus,
    "models": models,
    "fits": fits,
    "self_test": self_test,
    "kernels": kernels,
}
