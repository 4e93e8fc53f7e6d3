"""Types of settings: numbers and names with bounds.

Beyond the bounds arithmetic overflows, memory runs out, or a preview takes hours.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from sparrow.files import CONTROL
from sparrow.schema.base import FieldError

MOST_TOKENS = 2**20
MOST_ANSWERS = 2**20  # prompts x samples of one batch
LONGEST_NAME = 4096
LONGEST_TEXT = 2**16

T = TypeVar("T")

Report = Callable[[str], None]  # shows a message
Progress = Callable[[int, int, str], None]  # done, total, what

Count = Annotated[int, Field(ge=1, le=2**16)]  # of prompts, samples, rows
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokensOrZero = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
BatchTokens = Annotated[int, Field(ge=256, le=2**26)]
Budget = Annotated[int, Field(ge=48, le=MOST_TOKENS)]  # the three pages of 16 always kept
Steps = Annotated[int, Field(ge=1, le=10**9)]
StepsOrZero = Annotated[int, Field(ge=0, le=10**9)]
RowNumber = Annotated[int, Field(ge=0, lt=2**63)]
Workers = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(gt=0, lt=1)]
RateOrZero = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
HardMisses = Annotated[float, Field(ge=0, lt=1000)]  # per 1000 tokens
Gib = Annotated[float, Field(gt=0, le=2**20)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Temperature = Annotated[float, Field(ge=0, le=1e6)]  # 0 is greedy, more is uniform
# What becomes of samples under way when weights change; see Engine.update.
InFlight = Literal["keep", "recompute", "restart"]


def refuse_control(text: str) -> str:
    """Refuse control characters, line breaks, and very long texts."""
    if CONTROL.search(text) or "\n" in text or "\t" in text:
        raise ValueError("a text without control characters")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"a text of at most {LONGEST_NAME} characters")
    return text


def _refuse_terminal_codes(text: str) -> str:
    """Refuse control characters; a text of several lines may have line breaks and tabs."""
    if CONTROL.search(text):
        raise ValueError("a text without control characters")
    return text


def folder_name(name: str) -> str:
    """Refuse names that are not safe as the name of a folder, such as .. or a/b."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name) or name.endswith(".json"):
        raise ValueError("at most 200 letters, digits, '.', '_' and '-', as it names a folder")
    return name


def policy_name(name: str) -> str:
    """Refuse names with a dot, which separates the parts of a setting's key."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}", name):
        raise ValueError("at most 200 letters, digits, '_' and '-', a letter or digit first")
    return name


def plain_url(url: str) -> str:
    """Refuse what is no http address, and keys within it, which files of a run would keep."""
    if not is_web_address(refuse_control(url)):
        raise ValueError("http://HOST:PORT/v1 or https://..., without a name or a key")
    return url


def is_web_address(url: str) -> bool:
    """Whether it is an http address without a name or a key; its host may not exist."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (ValueError for one that is none)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def clean_key(text: str, name: str) -> str:
    """A key without the space around it; what no header can have is refused, and never shown."""
    key = text.strip()
    if not all(" " <= character <= "~" for character in key):
        raise ValueError(f"{name}: a key has printable ASCII characters alone")
    return key


def environment_key(name: str) -> str | None:
    """The key in a variable of the environment; None: it is not set, or empty."""
    return clean_key(os.environ.get(name, ""), name) or None


def _several(value: object) -> object:
    """Wrap a single value in a tuple."""
    return value if isinstance(value, list | tuple) or value is None else (value,)


def layer_numbers(value: object) -> object:
    """Parse layer numbers such as 0,1 or none."""
    texts = value if isinstance(value, list | tuple) else (value,)
    parts = ",".join(map(str, texts)).replace(" ", "").split(",")
    try:
        return tuple(sorted({int(part) for part in parts if part not in ("", "none")}))
    except ValueError:
        raise ValueError("numbers as 0,1 or none") from None


def _as_path(value: object, info: ValidationInfo) -> object:
    """Make a path of a text; the empty text is refused, as Path("") is Path(".")."""
    if value == "":
        raise ValueError("a path that is not empty")
    return Path(value) if isinstance(value, str) and info.mode == "python" else value


def _plain_path(path: Path) -> Path:
    refuse_control(str(path))
    return path


Name = Annotated[str, Field(min_length=1), AfterValidator(refuse_control)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT), AfterValidator(_refuse_terminal_codes)]
Setting = bool | int | float | str  # an argument of a function
Url = Annotated[str, Field(max_length=2048), AfterValidator(plain_url)]
FolderName = Annotated[str, AfterValidator(folder_name)]
PolicyName = Annotated[str, AfterValidator(policy_name)]  # also of a folder, and of metrics
Directory = Annotated[Path, BeforeValidator(_as_path), AfterValidator(_plain_path)]
FilePath = Directory
Several = Annotated[tuple[T, ...], BeforeValidator(_several)]  # an option that may be repeated
LayerNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1023)], ...], BeforeValidator(layer_numbers)
]


def renamed(values: Any, **names: str) -> Any:
    """Rename settings of older files (old="new"); a value under the new name takes precedence."""
    if not isinstance(values, dict):
        return values
    old = {new: values[name] for name, new in names.items() if name in values}
    return old | {name: value for name, value in values.items() if name not in names}


def _rows(values: Any) -> Any:
    """Rename settings of older files: `rows` was `file`, and `prompts` was `rows`."""
    counts = isinstance(values, dict) and isinstance(values.get("rows"), int)
    return renamed(renamed(values, rows="prompts") if counts else values, file="rows")


older_rows = model_validator(mode="before")(_rows)
older_out = model_validator(mode="before")(partial(renamed, dir="out"))


def refuse_many(counts: Mapping[str, int]) -> None:
    """Refuse more answers in one batch than MOST_ANSWERS."""
    product = 1
    for field, count in counts.items():
        product *= count
        if product > MOST_ANSWERS:
            allowed = f"{' x '.join(counts)} <= {MOST_ANSWERS} answers in all"
            raise FieldError(field, count, allowed)
