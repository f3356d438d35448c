"""Drivers of the engines that cpu_peers.py compares; each runs in a process of its own."""
