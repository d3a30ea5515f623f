"""What runs a step: the clock and memory gauges of a GPU, and a virtual machine that charges for each operation."""
