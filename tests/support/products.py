"""Whether this CPU gives a row of a matrix product the same bits whatever the other rows."""

from functools import cache

import torch
from torch.nn.functional import linear

import sparrow  # noqa: F401 (it sets what MKL needs for it)


@cache
def rows_are_independent() -> bool:
    """True on ARM, and on x86 with MKL_CBWR where MKL honours it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(32, 192, generator=generator) for _ in range(2))
    whole = linear(x, weight)
    return all(linear(x[:rows], weight).equal(whole[:rows]) for rows in range(1, 32))
