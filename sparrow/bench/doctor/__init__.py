"""What is on this machine, what works and what is missing, behind `sparrow doctor`."""
