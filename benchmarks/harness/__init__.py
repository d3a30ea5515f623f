"""What a sweep is made of: workloads by name, places to run them, cells in processes of their own, the run's folder."""
