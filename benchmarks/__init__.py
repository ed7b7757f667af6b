"""What is fast, measured beside models of others at equal shape: `python -m benchmarks train generate embed`."""
