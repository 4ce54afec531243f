"""Samples of a step: rollout buffers request samples from the engine pool and assemble them.

prompts --buffer, async_buffer--> requests --engines--> results --rewards--> samples.Rollout <--sample_files--> disk
"""
