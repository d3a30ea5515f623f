"""Clocks and memory counts of a step: gauges of a GPU, and a virtual machine that simulates one."""
