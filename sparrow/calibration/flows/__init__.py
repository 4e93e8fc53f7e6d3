"""Flows on trial: is one right, how good is it on a real model, and where does it err."""
