"""Programming tasks: small problems with hidden tests, composed of operations by seed."""
