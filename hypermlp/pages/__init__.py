"""Self-contained HTML pages: charts as SVG, one style, no scripts from elsewhere.

A plotting library would put megabytes of script into every page; what these pages need is a few hundred lines, and opens at once
on a phone.
"""

from hypermlp.pages.charts import Point, Series, interval_chart, line_chart, scatter_chart
from hypermlp.pages.page import render

__all__ = ["Point", "Series", "interval_chart", "line_chart", "render", "scatter_chart"]
