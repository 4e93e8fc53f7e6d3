"""Triton kernels: versions of the ops for CUDA devices, loaded on first use."""
