"""The definitions: plain torch, any device. What every faster version is tested against."""
