"""The paper's statements, measured on the real layer."""
