"""Configurations of other systems, translated by the table `controller/config/counterparts.yaml`.

FILE or COMMAND --reading--> their keys and values --translation, systems--> settings, and what differs

Nothing is run or imported: a script is read, a Python file is parsed.
"""
