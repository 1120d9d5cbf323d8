"""Benchmarks: ratios measured in one run, interleaved, against what a user would pick instead."""
