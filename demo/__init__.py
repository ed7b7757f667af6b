"""The demonstration: a grammar that writes a corpus, the recipe that trains on it, and a stranger who translates."""
