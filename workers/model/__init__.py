"""The training engine: a batch's rows through the model and its loss, gradients, optimiser, checkpoints.

Read `engine` first, then `forward_backward`. It knows neither Ray nor vLLM, and runs under torchrun.
"""
