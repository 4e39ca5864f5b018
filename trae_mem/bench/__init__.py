"""The benchmarks: `trae-mem bench NAME`.

Each measures side by side, in turns, in one run; gates its figures on correctness; and returns a
report that is JSON as it stands: everything printed or drawn comes from that report alone.
"""
