"""Evaluation with lm-evaluation-harness: the paper's table, and a suite that needs no network."""
