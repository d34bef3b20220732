"""Benchmarks: `python -m bench [round|jobs|overhead]` prints tables and writes JSON under bench/results."""
