"""Train: packs of documents, an objective, an optimiser step."""
