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
    """The torch build, its threads, and why it cannot use a GPU (None: it can)."""

    version: str
    build: str
    threads: int
    no_gpu: str | None


class Gpu(Record):
    """A GPU that torch can use; `kernels`: whether our kernels support it."""

    index: int
    name: str
    total: int
    free: int
    capability: str
    kernels: bool


class ModelState(Record):
    """A model; `whole`: whether all its files exist (they are not read)."""

    name: str
    folder: str | None
    whole: bool
    bytes: int


class Disk(Record):
    """The disk of a folder, which may not exist yet."""

    folder: str
    free: int
    writable: bool


class ModelStates(Record):
    """Models that load without a network, free disk space, and memory of the host."""

    shipped: tuple[ModelState, ...]
    fetched: tuple[ModelState, ...]
    cache: Disk
    runs: Disk
    memory: int


class SelfTest(Record):
    """Answer of tiny, dense and with a budget of the whole length: must be the same bits."""

    passed: bool
    tokens: int
    seconds: float


class KernelTest(Record):
    """Decode attention on a device, compared with its reference."""

    device: str
    version: str
    error: float
    passed: bool


class Broken(Record):
    """The stage that failed, and why."""

    stage: str
    why: str


class Advice(Record):
    """A problem or missing package, and how to fix it."""

    what: str
    how: str


class Examination(File):
    """The state of a machine. `problems` prevent the core from working, `missing` is optional.

    Fields of a stage that failed or was skipped are None.
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
    self_test: SelfTest | None = None
    kernels: tuple[KernelTest, ...] | None = None
    broken: Broken | None = None
    ready: bool = False
    devices: tuple[str, ...] = ()
    problems: tuple[Advice, ...] = ()
    missing: tuple[Advice, ...] = ()
