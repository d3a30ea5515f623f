"""Tools for testing code with streams, vdnn's or your own, without a GPU. They need torch and a C++ compiler."""
