"""What the engine can compute: families of models, and the layouts that each allows."""
