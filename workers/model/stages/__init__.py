"""Pipeline stages: the order of their passes, and the transfers between them."""
