"""Show and record a run, during and after it; nothing here affects training.

    trainer, roles --run_record: console--> the terminal
                   --live_metrics, trackers--> Ray (Prometheus, grafana_dashboard.json); TensorBoard, W&B, MLflow
                   --metrics: RunWriter, timeline--> runs/NAME/ --run_folder--> report.html, trace.json

metrics.yaml declares every metric (`metric_table`; `metric_page`: docs/metrics.md). `shown_text` shortens texts and
masks secrets. Read `run_record` first.
"""
