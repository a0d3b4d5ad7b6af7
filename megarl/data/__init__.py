"""Datasets and the loader: rows in, batches of rows out.

sources    the rows of a data set, before any tokenizer; no torch
encoding   the tokens of rows, by the tokenizer's chat template; no torch
dataset    `build_dataset`: rows with their tokens, held in memory
loader     `build_dataloader`: batches of rows in an order that a resumed run goes on with
"""
