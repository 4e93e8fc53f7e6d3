"""The configurations of `sparrow flow`: check, score, bench and texts."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from sparrow.schema.base import Record
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
    against: Several[Name] = option(("block_mean", "oracle"), "Flow to compare with.", "FLOW")
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
