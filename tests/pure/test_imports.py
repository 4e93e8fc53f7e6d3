"""The import direction of docs/architecture.md, the absence of cycles, and what stays unloaded."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"sparrow": ROOT / "sparrow", "sparrow_recipes": ROOT / "recipes" / "sparrow_recipes"}

# room -> rooms it may import. A room that is not named here may not exist.
BASE = {"files", "functions", "stats", "schema"}
ROLLOUT = BASE | {"ops", "sparse", "models"}
ALLOWED: dict[str, set[str]] = {
    "files": set(),
    "functions": set(),
    "progress": {"files"},
    "arguments": {"files", "functions", "progress", "schema", "sparse", "tasks"},
    "processes": {"files"},
    "schema": {"files"},
    "stats": {"schema"},
    "ops": set(),
    "sparse": BASE | {"ops"},
    "models": BASE | {"ops", "sparse"},
    "engine": ROLLOUT,
    "training": ROLLOUT,
    "sandbox": BASE,
    "tasks": BASE | {"processes", "sandbox"},
    "gate": BASE,
    "calibration": ROLLOUT | {"engine"},
    "serve": ROLLOUT | {"engine"},
    "client": {"files", "schema"},
    "dataflow": ROLLOUT
    | {"processes", "engine", "training", "tasks", "gate", "calibration", "client"},
    "reporting": BASE,
    "benchmarks": ROLLOUT | {"engine", "calibration", "training"},
    "api": ROLLOUT
    | {"arguments", "engine", "tasks", "calibration", "dataflow", "reporting", "benchmarks"},
    "__main__": {"cli"},
    "cli": BASE
    | {"sparse", "models", "engine", "tasks", "benchmarks", "calibration", "dataflow", "serve"}
    | {"reporting", "api", "processes"},
    # The programs of sparrow_recipes: nothing imports them, the command line finds them by name.
    "recipes": BASE
    | {
        "ops",
        "sparse",
        "models",
        "processes",
        "engine",
        "training",
        "tasks",
        "dataflow",
        "benchmarks",
    }
    | {"reporting", "api", "cli"},
}


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(Path(name) / file.relative_to(folder)): file
    for name, folder in FOLDERS.items()
    for file in folder.rglob("*.py")
}


def imports_of(file: Path) -> set[str]:
    """Modules of both packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name.split(".")[0] in FOLDERS}


def room(module: str) -> str:
    package, *inner = module.split(".")
    return "recipes" if package == "sparrow_recipes" else [*inner, "sparrow"][0]


def test_import_direction() -> None:
    assert not imports_of(MODULES["sparrow"]), "the package itself imports lazily"
    against = [
        f"{module} imports {imported}"
        for module, file in MODULES.items()
        for imported in imports_of(file)
        if room(imported) not in ("sparrow", room(module), *ALLOWED.get(room(module), ()))
    ]
    assert not against
    assert {room(module) for module in MODULES} <= {*ALLOWED, "sparrow"}


def test_no_cycle_between_modules() -> None:
    graph = {module: imports_of(file) - {module} for module, file in MODULES.items()}
    # A submodule may import from its own package's __init__ only if that does not import it back.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_no_cycle_between_rooms() -> None:
    try:
        TopologicalSorter({room: allowed - {room} for room, allowed in ALLOWED.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"the picture has a cycle: {' -> '.join(error.args[1])}")


HEAVY = {"torch", "transformers", "numba"}
LOADS = """
import sys
{act}
loaded = {heavy} & set(sys.modules)
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
HELP = """
from sparrow.cli import run
assert run(["--help"]) == run(["calibrate", "--help"]) == run(["study", "--help"]) == 0
"""


@pytest.mark.parametrize(
    "act",
    [
        "import sparrow",
        "import sparrow.sparse",
        "import sparrow.schema.train, sparrow.schema.surface, sparrow.schema.episode",
        "import sparrow.calibration.planning.hardware, sparrow.calibration.planning.plan",
        "import sparrow.client",
        "import sparrow_recipes.warmup.documents",  # what worker processes import
        HELP,
    ],
)
def test_loads_no_torch(act: str) -> None:
    code = LOADS.format(act=act, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_one_file_imports_ray() -> None:
    found = [
        name
        for name, file in MODULES.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "ray" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    ]
    assert {*found} == {"sparrow.dataflow.ray_cluster"}
