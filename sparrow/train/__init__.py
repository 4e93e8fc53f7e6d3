"""Train: packs of documents, an optimiser step, supervised warm-up."""
