"""Ray actors of the training roles and the reward workers, around the engine."""
