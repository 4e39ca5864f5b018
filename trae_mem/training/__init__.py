"""What `trae-mem train` does: resolve the model, cut the text, assemble HF Trainer and PEFT, run.

`run.run_training` is one run in this process; `comparison.run_comparison` sets streaming beside
all resident, each in a process of its own. Nothing here is needed to stream a model in one's own
training code: that takes `trae_mem.enable(model)` alone.
"""
