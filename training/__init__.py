"""Training: the modules that the loop in train.py calls.

config.py        RunConfig: all settings, with their defaults and limits
presets.py       values for the amount of text, and for the time
runtime.py       where a run computes: processes, device, dtype, micro batches, attention kernel
parallel.py      DDP and FSDP2: how processes divide the model
build.py         data and model of a run, its initial weights, and its facts
optimizer.py     optimizers and their step; muon.py is one of them; schedule.py has learning rates
train_state.py   what training changes, and what ends a run
teachers.py      several models of a run, and a student on their mean probabilities
run_folder.py    the folder of a run: name, lock, config.yaml, summary.json
checkpoint.py    saving, resuming, and what a resumed run removes
evaluate.py      validation loss, sample and attention statistics
log.py           progress, metrics.jsonl, results; speed.py has step times
banner.py        the first and the last lines of a run
plan.py          plan=true: parameters, memory and time of a run

Words:

model, wrapped_model   the GPT itself, for optimizers, checkpoints and samples; and as the loop
                       calls it, compiled and with communication
state     TrainState: model, optimizers, counters and the best evaluation
header    what all checkpoints of a run have: its identity, config and tokenizer
facts     what summary.json has from the start: machine, software, kernel, sizes
results   what summary.json gets with each checkpoint: newest metrics, best evaluation, speed
meta      content of meta.json of the prepared data: counts of tokens, tokenizer
spec      a tokenizer as plain data
"""
