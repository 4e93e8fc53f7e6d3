"""Child processes that speak JSON and never outlive whoever started them."""
