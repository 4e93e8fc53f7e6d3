"""Sparse: what to keep. Budget schedules and presets here; the torch side in its own modules.

`sparrow.sparse.flow` has the seam, `block_mean` the paper's rule, `budgets` the device lookup.
"""

from sparrow.sparse.presets import preset, preset_names
from sparrow.sparse.schedule import DENSE, LayerBudgets, Note, Schedule, kept_tokens

__all__ = [
    "DENSE",
    "LayerBudgets",
    "Note",
    "Schedule",
    "kept_tokens",
    "preset",
    "preset_names",
]
