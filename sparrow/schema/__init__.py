"""All configurations and results: strict pydantic classes, JSON in and out, no torch.

A configuration is read from TOML files, left to right, then `--section.key=value`. Errors name the
key, the value, what is allowed, and where the value came from. Results are files with a digest.
"""
