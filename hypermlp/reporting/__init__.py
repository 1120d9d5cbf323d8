"""Records, tables, charts and pages of any kind; hypermlp/commands/report.py lists the kinds."""
