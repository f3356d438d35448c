"""Drivers of the engines that cpu_throughput.py compares; each runs in a process of its own."""
