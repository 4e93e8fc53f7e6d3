"""`sparrow study`: many runs that differ in one thing, and what came of them, in one folder."""
