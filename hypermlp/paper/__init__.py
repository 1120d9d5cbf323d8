"""Published numbers that this project compares with, as data. Imports nothing of the package."""
