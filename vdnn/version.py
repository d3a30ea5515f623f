"""The version of vdnn, in a module of its own so that any other can read it without importing the package's face."""

__version__ = "0.1.0.dev0"
