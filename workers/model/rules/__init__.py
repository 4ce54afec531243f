"""Families of models that the engine can compute, and the layouts that each allows."""
