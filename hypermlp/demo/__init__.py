"""``hypermlp demo``: in a few minutes, on any machine, what the package is about."""
