"""Analysis of plans, for people and metrics; planning does not import it.

statistics --> findings, advice --> explain        one plan: its figures, where ranks wait, what would help
lengths_file, run_plan, distributions --> strategies   one batch under several algorithms
             --> report, gantt                     table, charts, page
"""
