"""A control study as its folder holds it: read, judged, told in tables, figures and words."""
