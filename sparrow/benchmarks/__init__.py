"""Measurements of this machine, behind `sparrow bench`."""
