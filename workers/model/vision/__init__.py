"""Vision towers: from pictures in a batch to embeddings in its rows, and their part of the check at load."""
