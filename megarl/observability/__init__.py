"""Reports on a run: log lines, metrics per step, timings, confidence intervals, report.

logging        get_logger: one line format, with the rank
stats_tracker  what any part of a script records, and the seconds of its phases
stats_logger   metrics of every step to the console, jsonl, tensorboard, wandb, a tracker
pages          a server of pages on this machine's loopback
prometheus     numbers in Prometheus' text form, and a page of those of a run
timeline       when things began and ended; which processes there are; traces of some steps
run_log        files that a run appends to, among them fingerprints; a thread that writes beside it
episodes       the recorded episodes
intervals      confidence intervals of accuracies, rewards and gains
report         a summary at the end, and one self-contained HTML file for a person to look at
viewer         one HTML file that shows episodes token by token
"""
