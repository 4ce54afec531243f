"""Samples of a step: rollout buffers ask the engine pool for samples and put them together.

prompts --buffer, async_buffer--> requests --engines--> results --rewards--> samples.Rollout <--sample_files--> disk
"""
