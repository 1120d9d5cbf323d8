"""The paper's statements as checks on the real layer: ``hypermlp verify``."""
