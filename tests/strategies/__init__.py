"""Hypothesis strategies over cases; of ``impl`` they know only what a domain is."""
