"""The tail gate: watches the 5th percentile of acceptance by length while training, and acts."""

from sparrow.gate.gate import Gate
from sparrow.schema.gate import Action, BinLook, Figures, Look, RatioEstimate, Reading, metrics

__all__ = ["Action", "BinLook", "Figures", "Gate", "Look", "RatioEstimate", "Reading", "metrics"]
