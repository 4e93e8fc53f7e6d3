"""Programs over sparrow's public functions, and the configurations that verbs know by name."""
