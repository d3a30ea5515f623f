"""The parts of a sweep: workloads by name, places to run them, cells in processes of their own, the run's folder."""
