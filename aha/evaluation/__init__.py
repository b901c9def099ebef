"""Evaluation: named protocols, the runner over any explainer, hard samples, the report."""
