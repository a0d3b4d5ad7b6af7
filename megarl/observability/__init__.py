"""Reports on a run: log lines, metrics per step, timings, confidence intervals, report.

logging        get_logger: one line format, with the rank
stats_tracker  what any part of a script records, and the seconds of its phases
timeline       when things began and ended; traces of some steps
run_log        files that a run appends to; a thread that writes beside it
utilization    model FLOP/s and their share of the hardware's peak
stats_logger   metrics of every step to the console, jsonl, tensorboard and wandb
intervals      confidence intervals of accuracies, rewards and gains
report         a summary at the end, and one self-contained HTML file for a person to look at
"""
