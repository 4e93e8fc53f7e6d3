"""`sparrow doctor`: what is here, what works, what is missing and how to get it."""

from collections.abc import Iterator, Mapping
from typing import Any

from sparrow import api
from sparrow.cli.output import AsJson, console, measuring, write_json
from sparrow.schema.verbs import DoctorConfig

Examined = Mapping[str, Any]
GIB = 2**30


def doctor(config: DoctorConfig, *, json: AsJson = False) -> int:
    with measuring("looking; the first time, kernels are compiled"):
        examined = api.doctor(config)
    if json:
        write_json(examined)
    else:
        show(examined)
    return int(not examined["ready"])


def show(found: Examined) -> None:
    """One screen: sections of lines, the verdict last."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for title, lines in (
        ("packages", _packages(found)),
        ("devices", _devices(found)),
        ("memory", _memory(found)),
        ("models", _models(found)),
        ("checks", _checks(found)),
    ):
        for number, line in enumerate(lines):
            grid.add_row("" if number else Text(title, style="bold"), line)
    console.print(grid)
    _verdict(found)


def _packages(found: Examined) -> Iterator[str]:
    yield f"sparrow {found['sparrow']}, Python {found['python']}, {found['platform']}"
    core = [each for each in found["packages"] if each["extra"] is None]
    yield ", ".join(_version(each, found["torch"]) for each in core)
    more = [each for each in found["packages"] if each["extra"] is not None]
    here = [_version(each, None) for each in more if each["version"]]
    gone = [each["name"] for each in more if not each["version"] and each["used"]]
    yield f"optional: {', '.join(here) or 'none'}" + (
        f"; not here: {', '.join(gone)}" if gone else ""
    )


def _version(package: Mapping[str, Any], torch: Mapping[str, Any] | None) -> str:
    """Name and version, and what is wrong with it."""
    name, version = package["name"], package["version"]
    if version is None:
        return f"{name} MISSING"
    build = f" ({torch['build']} build)" if torch and name == "torch" else ""
    old = f" TOO OLD, {package['minimum']} is the least" if package["state"] == "old" else ""
    return f"{name} {version}{build}{old}"


def _devices(found: Examined) -> Iterator[str]:
    cpu, torch = found["cpu"], found["torch"]
    threads = f"{torch['threads']} threads by torch" if torch else "threads unknown"
    quota = "" if cpu["quota"] is None else f", {cpu['quota']:.3g} cores' time by the container"
    given = "".join(f", {name}={value}" for name, value in cpu["environment"].items())
    yield f"CPU: {cpu['usable']} of {cpu['cores']} cores usable, {threads}{quota}{given}"
    yield f"bf16 on this CPU: {_bf16(cpu['bf16'])}"
    for gpu in found["gpus"] or ():
        yield (
            f"cuda:{gpu['index']} {gpu['name']}: {_gib(gpu['free'])} of {_gib(gpu['total'])} free, "
            f"compute capability {gpu['capability']}, driver {gpu['driver'] or 'unknown'}, "
            f"{'our kernels run here' if gpu['kernels'] else 'our kernels do not run here'}"
        )
    if found["gpus"] == []:
        yield "no GPU: everything runs on the CPU, slower"
    if found["gpus"] is None:
        yield "GPUs: unknown, as torch does not get that far"


def _bf16(instructions: list[str] | None) -> str:
    if instructions is None:
        return "the system does not say; float32 is the default"
    if not instructions:
        return "no instructions for it, so stay with float32, the default"
    return f"it has {', '.join(instructions)}; float32 is the default all the same"


def _memory(found: Examined) -> Iterator[str]:
    memory = found["memory"]
    yield f"RAM: {_gib(memory['available'])} of {_gib(memory['total'])} available"
    for each in found["disk"]:
        locked = "" if each["writable"] else ", NOT WRITABLE"
        yield f"disk for {each['what']}: {_gib(each['free'])} free{locked} ({each['folder']})"
    for each in found["fits"] or ():
        yield (
            f"fits {each['device']}, with one sequence of {each['tokens']} tokens: "
            f"{each['rollout'] or 'no published shape'} to generate, "
            f"{each['train'] or 'no published shape'} to train"
        )


def _models(found: Examined) -> Iterator[str]:
    models, hub = found["models"], found["hub"]
    if models is None:
        yield "unknown, as the package does not load"
    else:
        own = [_model(each) for each in (*models["shipped"], *models["fetched"])]
        yield ", ".join(own)
    names = ", ".join(hub["models"][:4]) + (", ..." if hub["models"][4:] else "")
    offline = "".join(f", {name}={value}" for name, value in hub["offline"].items())
    yield f"in the hub's cache: {names or 'nothing'}{offline}"


def _model(model: Mapping[str, Any]) -> str:
    if model["whole"]:
        return model["name"]
    return f"{model['name']} ({'DAMAGED' if model['folder'] else 'not fetched'})"


def _checks(found: Examined) -> Iterator[str]:
    test, broken = found["self_test"], found["broken"]
    if test is not None:
        said = "the same bits" if test["passed"] else "OTHER BITS"
        yield (
            f"tiny, {test['tokens']} tokens, dense and sparse with room for all: {said} "
            f"({test['seconds']:.1f} s)"
        )
    for each in found["kernels"] or ():
        module = each["version"].removeprefix("sparrow.")
        said = "right" if each["passed"] else "WRONG"
        yield f"attention on {each['device']} ({module}): {said}, error {each['error']:.1e}"
    if broken is not None:
        yield f"BROKEN at {broken['stage'].replace('_', '-')}: {broken['why']}"
    elif test is None:
        yield "not made (--no-check)"


def _verdict(found: Examined) -> None:
    if found["ready"]:
        verbs = ", ".join(found["ready_for"])
        where = " and ".join("the CPU" if name == "cpu" else name for name in found["devices"])
        ready = f"\n[bold green]ready for:[/] {verbs}, on {where}"
        console.print(ready, highlight=False, markup=True)
    else:
        console.print("\n[bold red]not ready.[/] To mend:", highlight=False, markup=True)
        _advise(found["problems"])
    if found["missing"]:
        console.print("missing, should you need it:", style="bold", highlight=False)
        _advise(found["missing"])


def _advise(advice: list[dict[str, str]]) -> None:
    for each in advice:
        console.print(f"  {each['what']}\n      {each['how']}", highlight=False)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.3g} GiB"
