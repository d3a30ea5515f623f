"""Finds changes that make a training faster or smaller: it watches real steps and rehearses a step with each change.

`vdnn.advise` is in examination.py; each kind of advice has a file of its own. Only what was seen in the program becomes
an advice.
"""
