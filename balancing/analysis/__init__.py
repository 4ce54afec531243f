"""Analyse plans, for people and metrics. Planning does not import this package.

statistics --> explain                               one plan: its figures, where ranks wait, what would help
lengths_file, distributions --> comparison           one batch under several algorithms
                            --> gantt                when each rank or stage computes
"""

import logging

OF_FOLDERS = (
    "mkdir -p failed",
    "not a writable directory",
    "temporary cache directory",
    "building the font cache",
)


def _is_about_a_plot(record: logging.LogRecord) -> bool:
    return not any(words in str(record.msg) for words in OF_FOLDERS)


# Where the home cannot be written, matplotlib takes a temporary folder, and says so at its import.
# MPLCONFIGDIR would silence that too, but its folder has to be made and removed.
for name in ("matplotlib", "matplotlib.font_manager"):
    logging.getLogger(name).addFilter(_is_about_a_plot)
