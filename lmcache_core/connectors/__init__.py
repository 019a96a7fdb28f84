"""Connectors: one subpackage a host engine, which speaks that host's API and nothing else."""
