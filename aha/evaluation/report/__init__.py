"""One self-contained page that shows an evaluation."""

from aha.evaluation.report.page import report_html

__all__ = ["report_html"]
