"""The OpenAI-compatible server over the engine."""
