"""docs/flows.md: its flow means what ours means, and its table has every flow."""

import re
from pathlib import Path

from sparrow.sparse.flows import library, loading
from sparrow.sparse.flows.flow import trace

TEXT = (Path(__file__).parents[3] / "docs/flows.md").read_text(encoding="utf-8")


def test_the_flow_of_the_tour_is_fine_means() -> None:
    """Up to how the scale is written: equal fields, equal operations."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    mine, ours = (trace(flow, 16, 64, 3) for flow in (names["mine"], library.fine_means(4)))
    assert mine.digest == ours.digest
    assert mine.bytes() == 136


def test_the_table_names_every_built_in_flow() -> None:
    table = TEXT[TEXT.index("| flow | score of a page") :]
    for name in loading.built_in():
        assert f"`{name}" in table, name
