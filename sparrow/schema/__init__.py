"""Every configuration and every result, once: strict pydantic, JSON in and out, no torch.

A configuration is TOML files left to right, then `--section.key=value`. What is wrong is said at
the start, with the key, what was given, what is allowed and where it came from. Results are files
with a digest; who reads one gets the type that was written.
"""
