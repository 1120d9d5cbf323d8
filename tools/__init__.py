"""Tools of the maintainers: `hypermlp bench op` runs them in a git checkout; the wheel does not have them."""
