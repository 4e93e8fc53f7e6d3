"""Sparse attention: which pages to keep. Budget schedules and presets; torch code in submodules.

`sparrow.sparse.flows` has the formulas, `rule` where they run, `budgets` the device lookup.
"""

from sparrow.schema.schedule import DENSE, LayerBudgets, Note, Schedule, kept_tokens
from sparrow.sparse.presets import named_schedule, preset, preset_names
