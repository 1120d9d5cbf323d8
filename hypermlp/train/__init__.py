"""Training: recipes, data, checkpoints, on top of transformers' Trainer."""
