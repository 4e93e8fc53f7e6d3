"""`sparrow warmup`: a thinking model from nothing, on puzzles with gold chains."""
