"""Checkpoints of a run: `progress` defines content and folders, `checkpoint_writer` saves and resumes."""
