"""Run many independent trainings, locally or on a Ray cluster, and record each result once."""
