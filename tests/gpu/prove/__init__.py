"""Prove a card with one command, without a network: `python -m tests.gpu.prove`.

parts (in order of value) --a process each, within its share of the time--> outcomes --> proof.json, a page's section

versions | suite FILE (tests of tests/gpu) | whole_run NAME (controller.fit) | tests.gpu.benchmark

A part that hangs, crashes or lacks a package leaves the others alone. On a CPU the same program runs small parts.
"""
