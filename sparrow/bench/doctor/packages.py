"""Which Python packages are here, which are too old, and how to get the others.

The table repeats pyproject.toml (a test compares them), because a checkout that is used without
being installed has no metadata. Nothing is imported: a package that is broken can be looked up.
"""

import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Literal

DISTRIBUTION = "sparrow-rl"

State = Literal["ok", "old", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that something needs: everything (`extra` None), or what `purpose` says."""

    name: str
    minimum: str
    purpose: str
    extra: str | None = None
    used: bool = True  # False: an extra of pyproject.toml that no verb uses yet


def _core(name: str, minimum: str, purpose: str) -> Package:
    return Package(name=name, minimum=minimum, purpose=purpose)


def _extra(extra: str, name: str, minimum: str, purpose: str, *, used: bool = True) -> Package:
    return Package(name=name, minimum=minimum, purpose=purpose, extra=extra, used=used)


BROWSER = "browser"  # its package needs a browser beside it
NOT_YET = "nothing uses it yet"

CORE = (
    _core("torch", "2.11", "tensors, training, GPUs"),
    _core("numpy", "1.26", "records"),
    _core("scipy", "1.12", "intervals and fits"),
    _core("numba", "0.61", "kernels for a CPU"),
    _core("safetensors", "0.5", "weights"),
    _core("transformers", "5.0", "tokenizers"),
    _core("gguf", "0.17", "sparrow fetch"),
    _core("pydantic", "2.7", "configurations"),
    _core("tomli-w", "1.0", "configurations"),
    _core("rich", "13", "the command line"),
    _core("jinja2", "3.1", "reports"),
    _core("tensorboard", "2.16", "curves of training"),
)
OPTIONAL = (
    _extra("kernels", "triton", "3.6", "kernels for a GPU; torch for CUDA brings it along"),
    _extra("math", "math-verify", "0.8", "judging answers in mathematics"),
    _extra("parquet", "pyarrow", "18", "rows from .parquet files"),
    _extra("gym", "reasoning-gym", "0.1.25", "tasks gym/NAME"),
    _extra("serve", "fastapi", "0.115", NOT_YET, used=False),
    _extra("serve", "uvicorn", "0.34", NOT_YET, used=False),
    _extra("ray", "ray", "2.44", NOT_YET, used=False),
    _extra(BROWSER, "playwright", "1.50", "testing reports in a browser"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A package and what is here of it."""

    package: Package
    version: str | None

    @property
    def state(self) -> State:
        if self.version is None:
            return "missing"
        return "old" if older(self.version, self.package.minimum) else "ok"

    @property
    def install(self) -> str:
        """The command that gets it, into the environment in which this runs."""
        package = self.package
        after = f" && {_beside('playwright')} install chromium" if package.extra == BROWSER else ""
        if package.extra is None or installed(DISTRIBUTION) is None or self.version is not None:
            return f"{pip()} install '{package.name}>={package.minimum}'{after}"
        return f"{pip()} install '{DISTRIBUTION}[{package.extra}]'{after}"


def look() -> list[Found]:
    """Every package of the table, core ones first."""
    return [Found(package=each, version=installed(each.name)) for each in (*CORE, *OPTIONAL)]


def installed(name: str) -> str | None:
    """The version that the metadata says; None: not installed. Unreadable metadata is "0"."""
    try:
        return version(name) or "0"
    except PackageNotFoundError:
        return None


def older(version: str, minimum: str) -> bool:
    """Whether a version is below a minimum, by the numbers at its start: 2.13.0+cpu is 2.13."""
    pairs = zip_longest(_numbers(version), _numbers(minimum), fillvalue=0)
    return next((has < asked for has, asked in pairs if has != asked), False)


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def pip() -> str:
    """pip of this Python: by its name where the shell would find that one."""
    return _beside("pip")


def _beside(program: str) -> str:
    """How to call a program of this Python's environment, also one that is still to come."""
    pip = shutil.which("pip")
    active = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return program if active else f"{sys.executable} -m {program}"
