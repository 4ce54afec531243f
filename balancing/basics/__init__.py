"""What every part of planning uses: checks of arguments, groups of sequences, caps, alignment and images.

`compiled` compiles loops with Numba if it is installed. Nothing here plans.
"""
