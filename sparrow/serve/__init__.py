"""Serving: the engine behind the HTTP interface of OpenAI."""
