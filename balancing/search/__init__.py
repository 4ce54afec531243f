"""Plan one mini-batch: which sequences share a micro-batch, which micro-batches run together, on which rank.

schedule   tries numbers of micro-steps, and keeps the best schedule
packing    sequences into micro-batches under caps (filling places them, exchange evens them out)
partition  k sets of equal weight, by Karmarkar-Karp
padded     runs of neighbours: the padded layout, and any layout in the given order

`lower_bounds` says how good a plan can be. `baselines` are the algorithms of other systems.
"""
