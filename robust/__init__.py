"""Attacks, corruptions and the measures of robustness; see docs/robustness.md."""
