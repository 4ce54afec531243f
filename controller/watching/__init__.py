"""What can be seen of a run, while it works and after; nothing here decides anything of the training.

    trainer, roles --console--> the terminal
                   --live, trackers--> gauges of Ray (Prometheus, `grafana_dashboard`); TensorBoard, W&B, MLflow
                   --metrics: RunWriter, spans--> runs/NAME/ --run_folder, report, timeline--> report.html, trace.json

Every metric is declared in `metric_catalog` (`metric_page`: docs/metrics.md). Texts are shortened and secrets masked in
`shown_text`. Read `metrics` first.
"""
