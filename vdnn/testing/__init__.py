"""Tools for testing stream code without a GPU: vdnn's own, and yours. Needs torch and a C++ compiler."""
