"""Results of benchmarks and configurations as files."""

import json

from rich.console import Console

from sparrow.benchmarks import timing
from sparrow.schema.base import to_dict
from sparrow.schema.bench import Benchmark


def check_output(result: Benchmark) -> None:
    """A result can be written as JSON and shown as a table."""
    json.dumps(to_dict(result))
    Console(quiet=True).print(timing.table(result))
