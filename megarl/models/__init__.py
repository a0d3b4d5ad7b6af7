"""Maps HF models to Megatron's: one declaration per family, the piece table, and the built models.

Reading configs, checking layouts and building piece tables import neither torch nor megatron.
"""
