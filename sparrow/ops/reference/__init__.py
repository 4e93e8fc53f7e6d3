"""The ops: contract and definition in one. What every faster version is tested against."""
