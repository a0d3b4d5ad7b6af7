"""Launchers start servers and trainers, watch them, and leave nothing behind."""
