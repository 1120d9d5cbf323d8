"""Benchmarks: ratios to what a user would otherwise choose, measured interleaved in one run."""
