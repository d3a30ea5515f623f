"""Finds changes that make a training faster or smaller: it watches real steps and rehearses a step with each change.

`vdnn.advise` is in examination.py, and the kinds of advice are in step_advice.py, memory.py, loader.py and
training_plan.py. Advice always follows from something seen in the program.
"""
