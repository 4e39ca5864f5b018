"""What a run leaves behind, and how it is shown: a summary, tables, plots, a timeline.

A run is recorded once (`summary.json`, `events.jsonl`, `memory.jsonl`) and rendered as often as
one likes (`trae-mem report FOLDER`).
"""
