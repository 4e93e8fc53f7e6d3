"""Flows as fused GPU kernels: the source is generated, the meaning is `flows.interpret`."""
