"""Datasets and the loader: rows in, batches of rows out.

sources    the rows of a data set, of files (rows, formats) or made (generated); no torch
template   the tokens of rows, by the tokenizer's chat template; no torch
dataset    `build_dataset`: rows with their tokens, held in memory
loader     `build_dataloader`: batches of rows in an order that a resumed run goes on with; draws
           draws those of mixtures and curricula
"""
