"""The configuration of `sparrow train`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
)

from sparrow.files import strings
from sparrow.schema.agents import AgentsConfig
from sparrow.schema.base import FieldError, Record
from sparrow.schema.code import CodeConfig
from sparrow.schema.common import (
    AttentionConfig,
    ChatConfig,
    ColumnsConfig,
    DecodingConfig,
    Device,
)
from sparrow.schema.simulation import TrainDispatchConfig
from sparrow.schema.types import (
    BatchTokens,
    Count,
    Directory,
    FolderName,
    Fraction,
    Gib,
    HardMisses,
    Name,
    PolicyName,
    Rate,
    RateOrZero,
    RowNumber,
    Seconds,
    Seed,
    Setting,
    Several,
    Share,
    Steps,
    StepsOrZero,
    Tokens,
    TokensOrZero,
    Url,
    Weight,
    Workers,
    older_out,
    older_rows,
    refuse_many,
)

Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class AdapterConfig(Record):
    """A LoRA adapter: a new one of some rank, or one that is there."""

    rank: Annotated[int, Field(ge=0, le=2**16)] = 0  # 0: no adapter, unless one is given
    adapter: Directory | None = None  # a folder to begin with; None: one that changes nothing
    targets: tuple[Module, ...] = get_args(Module)

    @property
    def on(self) -> bool:
        return bool(self.rank) or self.adapter is not None

    def _check(self) -> None:
        one = not self.rank or self.adapter is None
        self.require(one, "rank", "0 with an adapter, which has its own", self.rank)


class LoraConfig(AdapterConfig):
    """LoRA: matrices of low rank are trained, and added to weights that stay as they are."""

    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None  # None: the rank, a scale of 1

    def _check(self) -> None:
        super()._check()
        for name in ("alpha", "targets"):
            usual = getattr(self, name) == type(self).model_fields[name].default
            allowed = "only with a rank: an adapter has its own, and without both there is no LoRA"
            self.require(usual or bool(self.rank), name, allowed)


class TrainModelConfig(Record):
    """The policy. Weights are float32; `dtype` is that of the products and of the engine."""

    name: Name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU
    device: Device = "auto"
    lora: LoraConfig = LoraConfig()


class RowsConfig(Record):
    """Rows and their reward: a task, or rows."""

    # A puzzle family (assignments, countdown, graph), or gym/NAME of reasoning-gym.
    task: Name | None = None
    length: Tokens = 500  # of a task: approximate tokens of a solution
    # Of a task: the seed of the first row. Lower ones are for evaluation.
    first: RowNumber = 100_000
    prompts: Annotated[int, Field(ge=1, lt=2**63)] | None = (
        None  # of a task: number of rows, which then repeat; None: unlimited
    )
    # Rows: a .jsonl, .csv or .parquet file, or a dataset of the hub (owner/name[:split]).
    rows: Name | None = None
    columns: ColumnsConfig = ColumnsConfig()
    # The reward of rows: math, code, or module:function with the signature reward(text, answer) or
    # verl's compute_score(data_source, solution_str, ground_truth, extra_info). None: by
    # data_source.
    reward: Name | None = None
    deadline: Seconds = 10.0  # seconds a verdict may take before the verifier is killed
    workers: Workers = 2  # processes that run the reward
    memory_gib: Gib | None = None  # memory limit of each of them with its children
    code: CodeConfig = CodeConfig()  # of rows with tests of programs
    shuffle: bool = True  # rows of a file, anew in every epoch

    def _check(self) -> None:
        self.require((self.task is None) != (self.rows is None), "task", "one of task and rows")

    _older = older_rows


DivergenceKind = Literal[
    "reverse_kl", "forward_kl", "jensen_shannon", "total_variation", "tail", "k3"
]
MOST_RANK = 64  # room of an engine
Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]


class RolloutDistillConfig(AdapterConfig):
    """A LoRA adapter of the sparse actor, distilled from the dense policy after its updates.

    adapter: of `sparrow distill`, or of a run.
    """

    rank: Annotated[int, Field(ge=0, le=MOST_RANK)] = 0
    rate: Rate | None = None  # None: 5 x optimiser.rate
    every: StepsOrZero = 1  # steps; 0: never, the adapter stays as it is
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the step's trajectories
    divergence: DivergenceKind = "total_variation"  # of the sparse actor from the dense policy
    weight: Weight = 1.0  # lambda: of the divergence, beside the objective's own term
    ppo: bool = True  # that term, on the sparse actor; never under exact decoding
    # The dense policy that is distilled: that of the rollout, whose old log-probs are computed
    # anyway, or that after the step's update, for one more pass.
    teacher: Literal["old", "new"] = "old"
    lower: bool = True  # the gate may lower budgets, as gate.lower: what is won becomes speed

    def _check(self) -> None:
        super()._check()
        trained = self.every or not self.rank
        self.require(trained, "every", "1 or more for a new adapter, which changes nothing")


class RolloutConfig(DecodingConfig):
    """Sampling of rollouts, at temperature 1: from the unmodified distribution."""

    prompts: Count = 16  # a step
    samples: Count = 8  # a prompt
    max_tokens: Tokens = 1024  # of an answer
    max_prompt: Tokens | None = None  # longer prompts are skipped and counted; None: what fits
    temperature: Annotated[float, Field(ge=1.0, le=1.0)] = 1.0
    episode: Name | None = None  # module:function, async (actor, example) -> trajectories
    agents: AgentsConfig = AgentsConfig()  # of episodes whose agents spawn agents
    max_running: Count | None = None  # samples decoded in one batch
    kv_gib: Gib | None = None  # memory of the KV cache; None: what is free
    sleep: bool = True  # the engine frees its memory during the update
    # Servers that answer instead of an engine here: base URLs of their API, up to /v1. Their keys
    # are SPARROW_API_KEY and SPARROW_ADMIN_KEY. Repeat it for several.
    url: Several[Url] = ()
    # Servers keep their own weights: samples of an older policy, corrected as all others are.
    fixed_weights: bool = False
    distill: RolloutDistillConfig = RolloutDistillConfig()

    def _check(self) -> None:
        super()._check()
        sparse = not self.distill.on or self.sparse
        self.require(sparse, "distill.rank", "0 where rollouts are dense", self.distill.rank)
        refuse_many({"prompts": self.prompts, "samples": self.samples})
        once = len({url.rstrip("/") for url in self.url}) == len(self.url)
        self.require(once, "url", "every server once", self.url)
        own = not self.url or self.speculative.weights == "model"
        self.require(own, "speculative.weights", "model with rollout.url", self.speculative.weights)
        served = bool(self.url) or not self.fixed_weights
        self.require(served, "fixed_weights", "only with rollout.url", self.fixed_weights)
        fits = not self.fixed_weights or not self.distill.on
        self.require(fits, "fixed_weights", "false with rollout.distill", True)


class Choice(Record):
    """A built-in function by name, or module:function, with its arguments."""

    use: Name
    settings: dict[str, Setting] = Field(default_factory=dict)


class AlgorithmConfig(Record):
    """The objective; None: the default of the algorithm."""

    name: Literal["grpo", "dr-grpo", "dapo", "rloo", "remax", "reinforce++"] = "grpo"
    advantage: Name | None = None  # by name, or module:function
    surrogate: Choice | None = None
    aggregate: Name | None = None  # token-mean, seq-mean-token-mean, seq-mean-token-sum-norm
    corrections: tuple[Choice, ...] = (Choice(use="token-tis", settings={"cap": 10.0}),)
    dynamic: bool | None = None  # leave out groups that are all right or all wrong, and refill
    refills: Annotated[int, Field(ge=1, le=100)] = 4  # rounds of prompts that a step may take
    # Overlong shaping: from max_tokens - overlong on the reward falls along a line to -1. 0: none.
    overlong: TokensOrZero | None = None
    entropy: Weight = 0.0  # bonus for it
    kl: Weight = 0.0  # coefficient of the KL divergence from a frozen reference model (k3)
    reference: Name | None = None  # the reference model; None: the weights the run starts from

    def _check(self) -> None:
        self.require(self.kl or self.reference is None, "reference", "only with kl above 0")


class BatchConfig(Record):
    """Optimiser steps and micro-batches of a training step."""

    updates: Count = 1  # optimiser steps, each on a share of the prompts
    # Trajectories a step on which KL(new || old) is measured after its updates; 0: none.
    kl_sample: Annotated[int, Field(ge=0, le=2**16)] = 8
    tokens: BatchTokens = 16384  # of a micro-batch; a longer sequence is alone
    recompute: bool = True  # activations of a layer are computed again on the way back
    compile: bool | None = None  # torch.compile joins small kernels of a layer; None: on a GPU
    # Of old log-probs and updates. sparse: as in the rollout, so that the sparse actor is trained
    # on its own samples; evaluation stays dense.
    attention: Literal["dense", "sparse"] = "dense"


class GateConfig(Record):
    """The gate on p05 of acceptance, and on hard misses, by length."""

    mode: Literal["off", "warn", "act"] = "act"
    target: Fraction = 0.86
    # Most hard misses per 1000 tokens, a second bound beside the target; None: not bounded.
    hard_misses: HardMisses | None = None
    sample: Count = 8  # trajectories a step whose acceptance is measured exactly
    window: Count = 8  # steps that are looked at together
    bin: Tokens | None = (
        None  # width in tokens; None: the schedule's bins, or an eighth of the room
    )
    least: Annotated[int, Field(ge=1, le=10**9)] = 400  # tokens in a bin before it is judged
    prompts: Annotated[int, Field(ge=2, le=2**16)] = 8  # and prompts
    patience: Count = 3  # looks with a violated bound before action, unless it is surely violated
    raises: Annotated[int, Field(ge=0, le=1000)] = (
        3  # times a bin's budget is raised before it runs dense
    )
    factor: Annotated[float, Field(gt=1, le=8)] = 1.5  # by which a budget is raised
    lower: bool = False  # whether budgets may fall where the tail has slack
    slack: Fraction = 0.04  # lower end this far above target is slack
    # Stop rules on the policy, at `patience` steps in a row; None: off.
    # KL(new || old) of a step's updates, in nats a token.
    max_kl: Annotated[float, Field(gt=0, le=1e6)] | None = None
    # By which the entropy may be above or below its mean over the first `window` steps.
    entropy_factor: Annotated[float, Field(gt=1, le=1e6)] | None = None


class ValidationConfig(Record):
    """Rows that are answered every so many steps, to see whether it helps."""

    every: StepsOrZero = 0  # steps; 0: never. Also before the first step and after the last
    prompts: Count = 32
    samples: Count = 1
    first: RowNumber = 0  # seed of the first row of a task, or number of the first row of a file
    rows: Name | None = None  # a file or dataset of its own; None: the training's task
    # More evaluation sets, by name: rows or a task, as in data. All have the settings above.
    sets: dict[FolderName, Name] = Field(default_factory=dict)
    columns: ColumnsConfig | None = None  # of rows and sets; None: data.columns
    sparse: bool = False  # by the training's schedule; otherwise dense
    # Of several policies: those that are measured, each by itself; None: all that learn.
    policies: tuple[PolicyName, ...] | None = None
    # Play the run's episode on these rows, instead of one answer each; of several policies beside.
    episode: bool = False

    def _check(self) -> None:
        refuse_many({"prompts": self.prompts, "samples": self.samples})

    _older = older_rows


class TrainRunConfig(Record):
    """Length and output of a run."""

    out: Directory | None = None  # None: runs/train/NAME of the configuration
    name: FolderName = "train"
    # sync: rollout, then learning. async: at the same time, rollout in a process of its own.
    loop: Literal["sync", "async"] = "sync"
    steps: Steps = 100
    seed: Seed = 0
    save_every: Steps = 10  # between checkpoints
    keep: Count = 2  # checkpoints that stay
    rollouts: StepsOrZero = 1  # every so many steps the trajectories are kept, with text; 0: never
    tensorboard: bool = True
    wandb: Name | None = None  # project of Weights & Biases that gets the metrics; None: off
    skips: Steps = 5  # steps in a row without a finite loss and gradient before it stops
    # transformers: plain transformers in float32 on one device, to compare with.
    learner: Literal["sparrow", "transformers"] = "sparrow"
    # local, or the address of a Ray cluster (auto, HOST:PORT, ray://HOST:PORT): who learns, samples
    # and judges are its actors. None: this machine, or the ranks of torchrun.
    ray: Name | None = None
    ranks: Annotated[int, Field(ge=1, le=4096)] = 1  # learner ranks of a Ray cluster
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a GPU, of every such actor with one

    def _check(self) -> None:
        self.require(self.ray is not None or self.ranks == 1, "ranks", "1 without run.ray")

    _older = older_out


class OptimiserConfig(Record):
    """AdamW with linear warm-up and linear decay."""

    rate: Rate = 2e-3
    warm_up: StepsOrZero = 200
    decay: StepsOrZero = 1000
    final: Share = 0.02  # of the rate, at the last step
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    weight_decay: Weight = 0.1
    clip: Annotated[float, Field(gt=0, le=1e12)] = 1.0


class RateConfig(OptimiserConfig):
    """AdamW with a constant learning rate, the default of RL."""

    rate: RateOrZero = 1e-6
    warm_up: StepsOrZero = 0
    decay: StepsOrZero = 0
    final: Share = 1.0
    beta2: Fraction = 0.999
    weight_decay: Weight = 0.0


class OwnAttentionConfig(AttentionConfig):
    """Attention of one of several policies, which is checked when it is laid over the run's."""

    def _check(self) -> None:
        """A flow alone may be that of the run's budget."""


class OwnDecodingConfig(DecodingConfig):
    """Decoding of one of several policies, which is checked when it is laid over the run's."""

    attention: OwnAttentionConfig = OwnAttentionConfig()

    def _check(self) -> None:
        """Exact decoding may be that of the run's budget."""


class PolicyConfig(Record):
    """One of several policies of a run; what is None, or not set, is as in the run's own sections.

    Policies that train an adapter, or nothing, over the weights of `model` share one engine.
    """

    model: Name | None = None  # weights of its own; None: those of model.name
    lora: LoraConfig = LoraConfig()
    frozen: bool = False  # never trained: an opponent, a judge, a reference
    prompts: Count | None = None  # groups of a batch; None: rollout.prompts
    team: Share = 0.0  # of the team's reward in its own; 0: its own alone, 1: the team's alone
    rollout: OwnDecodingConfig | None = None  # its attention and decoding
    algorithm: AlgorithmConfig | None = None
    optimiser: RateConfig | None = None
    gate: GateConfig | None = None

    def _check(self) -> None:
        if not self.frozen:
            return
        for name in ("prompts", "team", "algorithm", "optimiser", "gate"):
            usual = getattr(self, name) == type(self).model_fields[name].default
            self.require(usual, name, "none where the policy is frozen")
        self.require(not self.lora.rank, "lora.rank", "0 where it is frozen: nothing trains it")

    @property
    def shares_engine(self) -> bool:
        """Whether it decodes with the weights of the base, and an adapter at most."""
        return self.model is None and (self.frozen or self.lora.on)


Section = TypeVar("Section", bound=Record)


def laid_over(base: Section, own: Record | None) -> Section:
    """A section of the run with what a policy sets in its own, field by field.

    A budget replaces a schedule, and a schedule a budget.
    """
    if own is None:
        return base
    changes: dict[str, Any] = {}
    for name in own.model_fields_set:
        value, usual = getattr(own, name), getattr(base, name)
        whole = not isinstance(value, Record) or isinstance(value, Choice)
        if value is not None:  # as if it were not set: files have no None
            changes[name] = value if whole else laid_over(usual, value)
    if isinstance(own, AttentionConfig) and own.budget is not None:
        changes = {"schedule": None, "force": False} | changes
    elif isinstance(own, AttentionConfig) and own.schedule is not None:
        changes = {"budget": None} | changes
    return base.replace(**changes)


@contextmanager
def refused_as(place: str) -> Iterator[None]:
    """Raise what is wrong with a section as the problem of a place."""
    try:
        yield
    except ValidationError as error:
        detail = error.errors()[0]
        path, cause = [place, *map(str, detail["loc"])], detail.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            field = ".".join([*path, cause.field])
            raise FieldError(field, cause.value, cause.allowed) from None
        raise FieldError(".".join(path), detail["input"], str(cause or detail["msg"])) from None


_OF_ROWS = ("rollout.max_prompt", "validation")  # settings that are for certain rows


class TrainConfig(Record):
    """`sparrow train`."""

    model: TrainModelConfig
    data: RowsConfig = Field({}, validate_default=True)  # refused: a task or rows must be set
    chat: ChatConfig = ChatConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    optimiser: RateConfig = RateConfig()
    gate: GateConfig = GateConfig()
    validation: ValidationConfig = ValidationConfig()
    dispatch: TrainDispatchConfig = TrainDispatchConfig()  # of run.loop = async
    run: TrainRunConfig = TrainRunConfig()
    # Several policies by name, which the episode gets by name; none: the one of the sections above.
    policies: dict[PolicyName, PolicyConfig] = Field(default_factory=dict)

    shortcuts: ClassVar = {
        "model": "model.name",
        "device": "model.device",
        "lora": "model.lora.rank",
        "task": "data.task",
        "length": "data.length",
        "rows": "data.rows",
        "columns": "data.columns",
        "reward": "data.reward",
        "prompts": "rollout.prompts",
        "samples": "rollout.samples",
        "max_tokens": "rollout.max_tokens",
        "episode": "rollout.episode",
        "advantage": "algorithm.advantage",
        "rate": "optimiser.rate",
        "budget": "rollout.attention.budget",
        "target": "gate.target",
        "schedule": "rollout.attention.schedule",
        "flow": "rollout.attention.flow",
        "system": "chat.system",
        "decoding": "rollout.decoding",
        "draft_tokens": "rollout.speculative.draft_tokens",
        "distill": "rollout.distill.rank",
        "url": "rollout.url",
        "loop": "run.loop",
        "staleness": "dispatch.staleness",
        "ray": "run.ray",
        "steps": "run.steps",
        "seed": "run.seed",
        "out": "run.out",
    }
    python_arguments: ClassVar = ("model", "rows")
    # Settings that replace each other, with what a recipe says for their sake.
    alternatives: ClassVar = (
        {
            "data.task": ("data.length", "data.first", "data.prompts", *_OF_ROWS),
            "data.rows": ("data.columns", "data.reward", *_OF_ROWS),
        },
        {
            "rollout.attention.budget": (),
            "rollout.attention.schedule": ("rollout.attention.force",),
        },
    )

    def _check(self) -> None:
        name, prompts = self.algorithm.name, self.rollout.prompts
        enough = self.rollout.samples >= 2 or name in ("remax", "reinforce++")
        allowed = f"2 at least: {name} compares the answers to a prompt"
        self.require(enough, "rollout.samples", allowed)
        even = prompts % self.batch.updates == 0
        self.require(even, "batch.updates", f"a divisor of rollout.prompts, {prompts}")
        measured = self.gate.max_kl is None or self.batch.kl_sample
        self.require(measured, "batch.kl_sample", "1 or more with gate.max_kl")
        if self.batch.attention == "sparse":
            sparse = self.rollout.sparse and self.rollout.decoding != "exact"
            self.require(sparse, "batch.attention", "dense, unless rollouts are sparse", "sparse")
            self.require(not self.rollout.distill.on, "batch.attention", "dense beside an adapter")
        alone = not self.model.lora.on or not self.rollout.distill.on
        self.require(alone, "model.lora.rank", "0 with rollout.distill", self.model.lora.rank)
        if self.run.learner != "sparrow":
            self._refuse_without_sparrow()
        if self.validation.every:
            self._refuse_seen()
        if self.run.loop == "async":
            self._check_async()
        if self.policies:
            self._check_policies()
        allowed = "names of policies" if self.policies else "none without policies"
        for place, section in (("validation", self.validation), ("rollout", self.rollout.agents)):
            place += ".agents.policies" if place == "rollout" else ".policies"
            named = {*(section.policies or ())} <= self.policies.keys()
            self.require(named, place, allowed, section.policies)
        played = self.rollout.episode is not None or not self.validation.episode
        self.require(played, "validation.episode", "false without rollout.episode")

    def _check_policies(self) -> None:
        """Refuse what several policies cannot do yet."""
        if self.run.loop == "async":
            staleness, in_flight = self.dispatch.staleness, self.dispatch.in_flight
            only = self.dispatch == TrainDispatchConfig(staleness=staleness, in_flight=in_flight)
            self.require(only, "dispatch", "staleness and in_flight alone with policies")
        self.require(self.run.ray is None, "run.ray", "none with policies")
        self.require(not self.rollout.url, "rollout.url", "none with policies")
        self.require(not self.rollout.distill.on, "rollout.distill.rank", "0 with policies")
        self.require(not self.model.lora.on, "model.lora.rank", "0: policies have theirs")
        self.require(self.run.learner == "sparrow", "run.learner", "sparrow with policies")
        self.require(self.rollout.episode is not None, "rollout.episode", "one with policies")
        allowed = "true with policies: their engines keep their memory"
        self.require(self.rollout.sleep, "rollout.sleep", allowed)
        trained = [name for name, policy in self.policies.items() if not policy.frozen]
        self.require(trained, "policies", "one that is not frozen, at least")
        for name in self.policies:
            self._check_policy(name)

    def _check_policy(self, name: str) -> None:
        prompts = self.policies[name].prompts or self.rollout.prompts
        allowed = f"a divisor of policies.{name}.prompts, {prompts}"
        self.require(prompts % self.batch.updates == 0, "batch.updates", allowed)
        own, place = self.policy(name), f"policies.{name}"  # checked as a run of its own
        usual = AlgorithmConfig().refills
        allowed = f"{usual} with policies: no more episodes are played in a round"
        refills = own.algorithm.refills
        self.require(refills == usual, f"{place}.algorithm.refills", allowed, refills)
        if self.policies[name].frozen:
            return
        decay, kl = own.optimiser.decay, own.algorithm.kl
        greedy = "remax" in (own.algorithm.name, own.algorithm.advantage)
        allowed = "0 with policies: how many steps each will take is not known"
        self.require(not decay, f"{place}.optimiser.decay", allowed, decay)
        allowed = "0 with policies, which have no reference"
        self.require(not kl, f"{place}.algorithm.kl", allowed, kl)
        allowed = "none with a greedy baseline, with policies"
        self.require(not greedy, f"{place}.algorithm.name", allowed, own.algorithm.name)

    def policy(self, name: str) -> "TrainConfig":
        """The settings of one of several policies, as those of a run with it alone."""
        own, sections = self.policies[name], self._sections(name)
        agents = self.rollout.agents.replace(policies=())
        changes = {"prompts": own.prompts or self.rollout.prompts, "agents": agents}
        with refused_as(f"policies.{name}"):
            return self.replace(
                model=self.model.replace(name=own.model or self.model.name, lora=own.lora),
                rollout=sections.pop("rollout").replace(**changes),
                **sections,
                validation=self.validation.replace(policies=None, episode=False),
                policies={},
            )

    def _sections(self, name: str) -> dict[str, Record]:
        """The sections of the run with what a policy sets in them."""
        found = dict[str, Record]()
        for part in ("rollout", "algorithm", "optimiser", "gate"):
            with refused_as(f"policies.{name}.{part}"):
                found[part] = laid_over(getattr(self, part), getattr(self.policies[name], part))
        return found

    def _filled(self, name: str) -> PolicyConfig:
        """A policy whose own sections are whole."""
        policy, sections = self.policies[name], self._sections(name)
        decoding = sections["rollout"].model_dump(include={*OwnDecodingConfig.model_fields})
        whole = {**sections, "rollout": OwnDecodingConfig.model_validate(decoding)}
        own = {part: each for part, each in whole.items() if getattr(policy, part) is not None}
        return policy.replace(**own)

    @field_serializer("policies", mode="wrap")
    def _resolved(
        self,
        policies: dict[str, PolicyConfig],
        write: SerializerFunctionWrapHandler,
        info: SerializationInfo,
    ) -> Any:
        """Sections are written whole: read again, all of their fields are set."""
        if info.exclude_unset:
            return write(policies)
        return write({name: self._filled(name) for name in policies})

    def _check_async(self) -> None:
        """Refuse what the asynchronous loop cannot do yet."""
        self.require(not self.rollout.distill.on, "run.loop", "sync with rollout.distill", "async")
        dense = self.batch.attention == "dense"
        self.require(dense, "run.loop", "sync with batch.attention = sparse", "async")
        one = not self.rollout.url or self.dispatch.workers <= 1
        self.require(one, "dispatch.workers", "1 with rollout.url", self.dispatch.workers)
        allowed = "0 with dispatch.staleness 0, where nothing can be replayed"
        fits = not self.dispatch.replay or self.dispatch.staleness > 0
        self.require(fits, "dispatch.replay", allowed, self.dispatch.replay)
        stale = self.dispatch.staleness > 0 and self.gate.mode != "off"
        heads = self.run.learner == "sparrow" or not stale
        allowed = "sparrow with an async loop and a gate: others keep no older LM heads"
        self.require(heads, "run.learner", allowed, self.run.learner)

    def _refuse_without_sparrow(self) -> None:
        """Refuse what other learners than ours cannot do."""
        needs = {
            "model.lora": self.model.lora.on,
            "rollout.distill": self.rollout.distill.on,
            "batch.attention = sparse": self.batch.attention == "sparse",
            "algorithm.kl": self.algorithm.kl > 0,
            "gate.max_kl": self.gate.max_kl is not None,
        }
        for setting, is_set in needs.items():
            self.require(not is_set, "run.learner", f"sparrow with {setting}")

    def _refuse_seen(self) -> None:
        """Refuse validation on rows of the training."""
        held, data = self.validation, self.data
        places = [held.rows, *held.sets.values()]
        apart = data.rows is None or ({*places} - {None} and data.rows not in places)
        allowed = "rows apart from data.rows: accuracy on rows that are trained on says little"
        self.require(apart, "validation.rows", allowed)
        if data.task is None or (held.rows is not None and data.task not in places):
            return
        last = None if data.prompts is None else data.first + data.prompts
        seen = held.first + held.prompts > data.first and (last is None or held.first < last)
        seeds = f"{data.first} to {'no end' if last is None else last - 1}"
        self.require(not seen, "validation.first", f"rows apart from those of training, {seeds}")


# Settings that name code, which a run imports. A user's own configuration may name code; a
# configuration found in a run directory is untrusted, and its code is not imported unless allowed.
# Every text in the form of an import path counts (module:function, or a Python file), except in the
# settings of DATA: new settings are refused until they are listed there.

# Settings of `sparrow train` that never name code; keys in lists without a number.
DATA = {
    "algorithm.name",
    "algorithm.reference",
    "batch.attention",
    "chat.system",
    "data.code.cgroup",
    "data.code.reward",
    "data.columns.answer",
    "data.columns.prompt",
    "data.columns.source",
    "data.rows",
    "data.task",
    "dispatch.in_flight",
    "dispatch.late",
    "dispatch.listen",
    "gate.mode",
    "model.device",
    "model.dtype",
    "model.lora.adapter",
    "model.lora.targets",
    "model.name",
    "rollout.agents.policies",
    "rollout.attention.schedule",
    "rollout.decoding",
    "rollout.distill.adapter",
    "rollout.distill.divergence",
    "rollout.distill.targets",
    "rollout.distill.teacher",
    "rollout.speculative.acceptance",
    "rollout.speculative.weights",
    "rollout.url",
    "run.learner",
    "run.loop",
    "run.out",
    "run.name",
    "run.ray",
    "run.wandb",
    "validation.columns.answer",
    "validation.columns.prompt",
    "validation.columns.source",
    "validation.policies",
    "validation.rows",
}
# Arguments of functions and of the chat template, and rows by name: values, never imported.
ARGUMENTS = (".settings.", "_settings.", "chat.template.", "validation.sets.")


def code_settings(config: TrainConfig) -> dict[str, str]:
    """Return the code that a configuration names, by dotted key, as {"rollout.episode": "m:f"}.

    Names of what is part of the package (math, token-tis, quest) are no code in this sense.
    """
    return {
        key: text
        for key, text in strings(config.model_dump(mode="json"))
        if key and not _is_data(key) and names_code(text)
    }


def _is_data(key: str) -> bool:
    """Whether a setting never names code, whatever a policy that it is of is called."""
    key = re.sub(r"\[\d+\]", "", re.sub(r"^policies\.[^.]*\.", "", key))
    return key in DATA or any(part in key for part in ARGUMENTS)


def names_code(text: str) -> bool:
    """Whether a text has the form of an import path (module:name, or a Python file), or asks for
    programs to run without a sandbox.
    """
    return ":" in text or text.endswith(".py") or text == "unsafe"
