"""`ballast replay`: train a recorded step again, from the samples in the run's folder."""
