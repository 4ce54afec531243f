"""Checkpoints of a run: `progress` says what they hold and where, `checkpoint_writer` saves and resumes."""
