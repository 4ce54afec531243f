"""Commands that show a recorded run or a chat template: show, report, timeline, template."""
