"""Everything that shows or keeps a run, while it works and after; nothing here affects training.

    trainer, roles --run_record: console--> the terminal
                   --live_metrics, trackers--> gauges of Ray (Prometheus, `grafana_dashboard`); TensorBoard, W&B, MLflow
                   --metrics: RunWriter, spans--> runs/NAME/ --run_folder, report, timeline--> report.html, trace.json

Every metric is declared in `metric_catalog` and `live_catalog` (`metric_page`: docs/metrics.md). Texts are shortened
and secrets masked in `shown_text`. Read `run_record` first.
"""
