"""Configurations and results of `sparrow flow`: tests and quality of flows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sparrow.schema.base import Record, Table
from sparrow.schema.common import Device, Dtype
from sparrow.schema.options import argument, option
from sparrow.schema.types import Count, Directory, FilePath, LayerNumbers, Name, Several, Tokens

WHERE = "file.py[:name], module:name, or a built-in flow such as quest or 'fine_means(2)'."
PageSize = Annotated[int, Field(ge=1, le=256)]
Flows = Annotated[Several[Name], Field(min_length=1)]
KeptPages = Annotated[Count, Field(ge=3)]


class FlowCheckConfig(Record):
    """`sparrow flow check`."""

    flow: Name = argument(..., WHERE)
    page: PageSize = 16
    head_size: Annotated[int, Field(ge=1, le=512)] = option(128, "Numbers of a head.")
    group: Annotated[int, Field(ge=1, le=64)] = option(2, "Query heads of a KV head.")
    device: Device = "auto"


class FlowScoreConfig(Record):
    """`sparrow flow score`."""

    flow: Flows = argument(..., WHERE)
    model: Name = "smollm2-135m"
    budget: Several[Tokens] = (512, 1024)
    texts: Directory | None = option(None, "A folder of .txt, .py and .md. Default: ten texts.")
    tokens: Annotated[Tokens, Field(ge=2)] = option(8192, "Tokens of every text.")
    against: Several[Name] = option(("block_mean", "oracle"), "Flow to compare with.")
    page: PageSize = 16
    first: Annotated[int, Field(ge=0, le=2**16)] = option(1, "First pages, always kept.")
    last: Count = option(2, "Last pages, always kept.")
    dense_layers: LayerNumbers = option((0, 1), "Layers that stay dense: such as 0,1, or none.")
    device: Device = "auto"
    dtype: Dtype = option("float32", "auto, float32 (sparsity without rounding) or bfloat16.")
    out: Directory = option(Path("runs/flow-score"), "What is there is not measured again.")
    leaderboard: FilePath | None = option(
        None, "Append a JSON line for each flow and budget, with what is due to the formula."
    )


class FlowBenchConfig(Record):
    """`sparrow flow bench`."""

    flow: Flows = argument(..., WHERE)
    device: Device = "auto"
    batch: Count | None = option(None, "Sequences at once.")
    context: Tokens | None = option(None, "Tokens of every sequence.")
    kept: KeptPages | None = option(None, "Pages kept, the 3 always kept included.")
    brief: bool = option(False, "Time this one shape; no others beside it.")


class FlowTextsConfig(Record):
    """`sparrow flow texts`."""

    out: Directory = argument(..., "Where to copy them.")
    all: bool = option(False, "Those of every split, each in a folder, for sparrow flow loop.")


# Results.


class Configuration(Record):
    """The parameters of a rule besides its formula and budget. The defaults are the paper's."""

    page: int = 16
    first: int = 1
    last: int = 2
    dense_layers: tuple[int, ...] = (0, 1)


class FlowField(Record):
    """A field that a flow stores with a page. Bytes are of one page and KV head, bf16 keys."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int


class FlowTest(Record):
    """The comparison of two implementations on one sequence; a choice is of a token and KV head."""

    sequence: str
    compared: str
    choices: int
    near_ties: int  # differ by pages of equal score up to rounding
    different: int
    ties: bool  # whether any number of near ties is accepted
    first: str  # place of the first difference
    passed: bool


class FlowCheck(Table, Record):
    """The program of a flow for some sizes, and the result of its differential tests.

    A flow without a score keeps every page: there are no tests.
    """

    title: ClassVar[str] = "{0.flow}, passed: {0.passed}"
    shown: ClassVar[str] = "tests"

    flow: str
    digest: str
    page: int
    head_size: int
    group: int
    fields: tuple[FlowField, ...]
    bytes: int
    of_mean: float  # that a step reads, over one 16-bit mean key; mean over layers (`Flow.layers`)
    of_kv: float
    state: Mapping[str, float]  # of a request, with its first value
    mass: float | None
    operations: int
    over_pages: Mapping[str, int]
    kernels: Mapping[str, str]
    compiles: bool  # for a GPU, at these sizes
    device: str
    tests: tuple[FlowTest, ...] = ()
    passed: bool = True
    unordered: int = 0  # scores that are NaN: such pages are selected last


class Errors(Record):
    """Mean attention error on the dense residual stream; None if nothing was dropped.

    recall  share of the pages of greatest attention mass that were kept, as many as the budget
            pays, without those that every rule keeps
    mass    share of all attention mass on kept tokens, mean over heads
    error   norm of the change of the layer's attention output, over the norm of that output
    """

    recall: float | None = None
    mass: float | None = None
    error: float | None = None


class FlowText(Record):
    """A text, with the digest of its tokens."""

    name: str
    kind: str
    sha256: str
    note: str


class FlowScore(Errors, Configuration):
    """A flow with a budget: means over texts, with 95 % intervals over texts.

    gain                above the block mean in the same configuration
    configuration_gain  of the block mean in this configuration above that in the reference's
    """

    flow: str
    digest: str
    bytes: int
    of_mean: float
    budget: int
    submitted: bool
    p05: float
    p05_low: float | None
    p05_high: float | None
    gain: float
    gain_low: float | None
    gain_high: float | None
    configuration_gain: float | None = None
    configuration_gain_low: float | None = None
    configuration_gain_high: float | None = None
    mean: float
    hard_misses: float  # per 1000 tokens; see sparrow/stats.py
    p05_by_text: tuple[float, ...]
    mean_by_text: tuple[float, ...]
    hard_misses_by_text: tuple[float, ...]
    layers: Mapping[str, Errors]
    seconds: float

    def leaderboard(self) -> dict[str, Any]:
        row = self.model_dump(mode="json")
        named = {"p05": "p05", "gain": "gained_by_formula"}
        named["configuration_gain"] = "gained_by_configuration"
        return {
            "formula": {key: row[key] for key in ("flow", "digest", "bytes", "of_mean")},
            "configuration": {key: row[key] for key in (*Configuration.model_fields, "budget")},
            **{
                key: {"mean": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
                for name, key in named.items()
            },
            "acceptance": row["mean"],
            "hard_misses": row["hard_misses"],
            **{key: row[key] for key in Errors.model_fields},
        }


class FlowScores(Table, Record):
    """The result of `sparrow flow score`: flows compared on the same texts."""

    title: ClassVar[str] = "{0.model}, {0.tokens} tokens of each text"

    model: str
    fingerprint: str
    dtype: str
    device: str
    tokens: int
    texts: tuple[FlowText, ...]
    configuration: Configuration
    rows: tuple[FlowScore, ...]

    def leaderboard(self, when: str) -> list[dict[str, Any]]:
        """Return the lines of the leaderboard: one for every submitted flow and budget.

        gained_by_formula        p05 above the block mean's in the same configuration
        gained_by_configuration  what the block mean itself gains from that configuration over the
                                 reference: page 16, first 1, last 2, dense layers 0 and 1
        """
        about = self.model_dump(include={"model", "fingerprint", "dtype", "device", "tokens"})
        about["texts"] = {text.name: text.sha256 for text in self.texts}
        submitted = [row for row in self.rows if row.submitted]
        return [{"when": when, **row.leaderboard(), **about} for row in submitted]
