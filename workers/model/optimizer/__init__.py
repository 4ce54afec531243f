"""Optimisers, their schedules and states, and the guard that skips steps that are not finite."""
