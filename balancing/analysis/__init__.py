"""Analyse plans, for people and metrics. Planning does not import this package.

statistics --> explain                               one plan: its figures, where ranks wait, what would help
lengths_file, distributions --> comparison           one batch under several algorithms
                            --> gantt                when each rank or stage computes
"""
