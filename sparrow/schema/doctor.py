"""`sparrow doctor`: what is on a machine, what works and what is missing. Sizes are bytes."""

from typing import ClassVar, Literal

from sparrow.schema.base import File, Record


class PackageState(Record):
    """A package that something needs: everything (`extra` None), or what `purpose` says."""

    name: str
    minimum: str
    purpose: str
    extra: str | None
    version: str | None  # that is installed
    state: Literal["ok", "old", "missing"]
    install: str  # the command that installs it


class TorchBuild(Record):
    """Which torch this is, how many threads it uses, and why it can use no GPU (None: it can)."""

    version: str
    build: str
    threads: int
    no_gpu: str | None


class Gpu(Record):
    """A GPU that torch can use; `kernels`: ours are written for it."""

    index: int
    name: str
    total: int
    free: int
    capability: str
    kernels: bool


class ModelState(Record):
    """A model that may be here; `whole`: its files are there (they are not read)."""

    name: str
    folder: str | None
    whole: bool
    bytes: int


class Disk(Record):
    """Where a folder is, or will be."""

    folder: str
    free: int
    writable: bool


class ModelStates(Record):
    """Models that load without a network, and the room for more: disk, and memory of this host."""

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
    """tiny answers a puzzle dense, and with a budget of the length: by rule the same bits."""

    passed: bool
    tokens: int
    seconds: float


class KernelTest(Record):
    """Decode attention on a device, by the version that runs there, against its definition."""

    device: str
    version: str
    error: float
    passed: bool


class Broken(Record):
    """The stage that did not end, and how it failed."""

    stage: str
    why: str


class Advice(Record):
    """What is wrong or missing, and how to mend it."""

    what: str
    how: str


class Examination(File):
    """What is here, and the verdict: `problems` keep the core from working.

    `missing` things would add something. What a stage that broke or was not wanted would have told
    is None.
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
