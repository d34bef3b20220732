"""Benchmarks: `python -m bench [NAME ...]` prints tables and writes JSON and plots under bench/results."""
