"""Holds the package `megarl_receiver` alone, so that a server's PYTHONPATH can name this folder."""
