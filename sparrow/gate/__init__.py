"""The tail gate: watches the 5th percentile of acceptance by length while training, and acts."""

from sparrow.gate.gate import Gate

__all__ = ["Gate"]
