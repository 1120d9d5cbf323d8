"""The demonstration of ``hypermlp demo``."""
