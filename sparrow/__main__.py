"""`python -m sparrow` is `sparrow`."""

from sparrow.cli import main

main()
