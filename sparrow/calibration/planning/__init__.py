"""Planning: what budgets cost on a machine, and the cheapest that keep a target."""
