"""Parameters, FLOPs and memory of mixers and models."""
