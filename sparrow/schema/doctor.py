"""The result of `sparrow doctor`: packages, devices, models and checks. Sizes are in bytes."""

from typing import ClassVar, Literal

from sparrow.schema.base import File, Record


class PackageState(Record):
    """A required package, or an optional one (`extra`) for a `purpose`."""

    name: str
    minimum: str
    purpose: str
    extra: str | None
    version: str | None  # installed version
    state: Literal["ok", "old", "missing"]
    install: str  # the command that installs it


class TorchBuild(Record):
    """Version and build of torch, its threads, and why it cannot use a GPU (None: it can)."""

    version: str
    build: str
    threads: int
    no_gpu: str | None


class Gpu(Record):
    """A GPU that torch can use; `kernels`: whether ours support it."""

    index: int
    name: str
    total: int
    free: int
    capability: str
    kernels: bool


class ModelState(Record):
    """A model; `whole`: its files exist (they are not read)."""

    name: str
    folder: str | None
    whole: bool
    bytes: int


class Disk(Record):
    """The disk of a folder that exists, or will."""

    folder: str
    free: int
    writable: bool


class ModelStates(Record):
    """Models that load without a network; space for more on disk; memory of this host."""

    shipped: tuple[ModelState, ...]
    fetched: tuple[ModelState, ...]
    cache: Disk
    runs: Disk
    memory: int


class LargestModels(Record):
    """The largest published shapes that fit into `bytes` of a device, with a sequence of `tokens`.

    None: not even the smallest fits.
    """

    device: str
    bytes: int
    tokens: int
    rollout: str | None
    training: str | None


class SelfTest(Record):
    """tiny generates dense and with a budget of all tokens: the bits must be equal."""

    passed: bool
    tokens: int
    seconds: float


class KernelTest(Record):
    """The error of decode attention on a device against its definition."""

    device: str
    version: str
    error: float
    passed: bool


class Broken(Record):
    """The stage that failed, and how."""

    stage: str
    why: str


class Advice(Record):
    """What is wrong or missing, and how to fix it."""

    what: str
    how: str


class Examination(File):
    """What is on a machine, and the verdict: `problems` keep the core from working.

    `missing` things are optional. Results of stages that failed or were not run are None.
    """

    what: ClassVar[str] = "examination"
    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "sparrow doctor --json"

    format: int = 1
    sparrow: str
    python: str
    platform: str
    executable: str
    packages: tuple[PackageState, ...]
    cores: int | None
    driver: str | None  # NVIDIA's
    torch: TorchBuild | None = None
    gpus: tuple[Gpu, ...] | None = None
    models: ModelStates | None = None
    fits: tuple[LargestModels, ...] | None = None
    self_test: SelfTest | None = None
    kernels: tuple[KernelTest, ...] | None = None
    broken: Broken | None = None
    ready: bool = False
    devices: tuple[str, ...] = ()
    problems: tuple[Advice, ...] = ()
    missing: tuple[Advice, ...] = ()
