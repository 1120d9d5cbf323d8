"""Records, tables, charts and pages."""
