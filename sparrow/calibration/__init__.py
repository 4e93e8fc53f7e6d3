"""Calibration: measures how far the sparse actor strays from the dense policy."""
