"""What would make this training faster or smaller: a step is watched, rehearsed with and without each change, and said.

`vdnn.advise` is in examination.py; each finding has a file of its own. Only what was seen becomes an advice.
"""
