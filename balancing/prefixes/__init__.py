"""Plan sequences that share prefixes, such as samples of one prompt: a micro-batch computes a prefix once.

`groups` describes who shares what, and `packing` schedules it. `patch_cap` caps the images of a micro-batch.
"""
