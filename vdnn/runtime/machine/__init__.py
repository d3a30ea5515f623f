"""What runs the step: the clock and memory gauges of a GPU, and a virtual machine that charges for operations and copies."""
