"""Imports the whole grammar, which registers every production."""

from tests.fuzz import blocks, elementwise, extras, functions, norms, products, training, views, writes

ALL = (blocks, elementwise, extras, functions, norms, products, training, views, writes)
