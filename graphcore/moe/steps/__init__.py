"""Steps: what a call of GraphReuse finds out, does and notes."""
