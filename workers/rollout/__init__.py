"""The actor around one vLLM engine, which plays samples, episodes and agents' sessions, and their results."""
