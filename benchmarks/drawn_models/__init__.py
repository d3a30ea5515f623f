"""Models of public libraries at their default sizes, drawn by a seed, each planned and run as predicted.

`python -m benchmarks.drawn_models FILE` draws and plans them; `--table` prints what a file has.
"""
