"""`sparrow demo`: the whole idea on a laptop, in minutes, with a model that ships."""
