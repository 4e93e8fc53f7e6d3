"""The tail gate: watches the 5th percentile of acceptance by length while training, and acts."""

from sparrow.calibrate.gate.gate import Gate
from sparrow.calibrate.gate.look import (
    Action,
    BinLook,
    Estimate,
    Figures,
    Look,
    Reading,
    metrics,
)

__all__ = ["Action", "BinLook", "Estimate", "Figures", "Gate", "Look", "Reading", "metrics"]
