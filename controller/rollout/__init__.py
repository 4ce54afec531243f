"""Samples of a step: rollout buffers request samples from the engine pool and assemble them.

prompts --buffer, async_buffer--> requests --engines, rewards--> samples.RolloutBatch <--sample_files--> disk
                            good samples of earlier steps --replay_buffer--> a step's batch
"""
