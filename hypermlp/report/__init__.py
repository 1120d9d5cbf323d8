"""Any runs and records on one page: ``hypermlp report``."""
