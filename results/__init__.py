"""Everything that reads run folders, which training writes.

metrics.py      the registry: what tables, plots and wandb show of each metric
read.py         runs and their curves; variants, which are runs with equal configs
statistics.py   means with intervals over seeds, pairs of runs, verdicts
compare.py      a row and a sentence for each variant, the terminal's table, comparison.csv
card.py         the model card of an exported run
plots.py        loss.png of a run, comparison.png
"""
