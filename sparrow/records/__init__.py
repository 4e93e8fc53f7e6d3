"""Records: what crosses a boundary between rooms, processes and files.

Each is a frozen dataclass that checks itself when it is built, so whoever receives one need not.
Standard library and numpy alone, so that a task, a report or a remote worker can read them
without torch.
"""

from sparrow.records.base import (
    BoolArray,
    FieldError,
    Float32Array,
    Float32Matrix,
    Int16Array,
    Int32Array,
    Int32Matrix,
    Record,
    from_dict,
    to_dict,
)
from sparrow.records.completion import LOGPROB_NOISE, Completion, FinishReason
from sparrow.records.document import Document
from sparrow.records.episode import (
    NOT_SAMPLED,
    Group,
    GroupStats,
    Role,
    TrainSample,
    Trajectory,
    Turn,
)
from sparrow.records.sampling import LEAST_TEMPERATURE, OutputOptions, SamplingParams

__all__ = [
    "LEAST_TEMPERATURE",
    "LOGPROB_NOISE",
    "NOT_SAMPLED",
    "BoolArray",
    "Completion",
    "Document",
    "FieldError",
    "FinishReason",
    "Float32Array",
    "Float32Matrix",
    "Group",
    "GroupStats",
    "Int16Array",
    "Int32Array",
    "Int32Matrix",
    "OutputOptions",
    "Record",
    "Role",
    "SamplingParams",
    "TrainSample",
    "Trajectory",
    "Turn",
    "from_dict",
    "to_dict",
]
