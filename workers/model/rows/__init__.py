"""Rows of a micro-batch: `packing` lays sequences out, `prefix_rows` stores shared prefixes once."""
