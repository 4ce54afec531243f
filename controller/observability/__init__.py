"""Show and record a run, during and after it. Nothing here affects training.

    trainer, roles --run_record: console--> the terminal
                   --live_metrics--> Ray (Prometheus, grafana_dashboard.json)
                  --trackers--> TensorBoard, W&B, MLflow
                   --run_folder: RunWriter, timeline--> runs/NAME/ --RunFolder--> report.html, trace.json

metrics.yaml declares every metric. `metric_table` reads it, and `metric_page` writes docs/metrics.md.
`shown_text` shortens texts and masks secrets. Read `run_record` first.
"""

import balancing.analysis  # noqa: F401  before matplotlib: it filters what that logs at its import
