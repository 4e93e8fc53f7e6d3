"""Compiles flows to fused GPU kernels; `flows.interpret` defines what they compute."""
