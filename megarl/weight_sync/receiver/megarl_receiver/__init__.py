"""Receives a server rank's own slices of new weights, inside a stock SGLang server (0.5.23).

    PYTHONPATH=<the folder above> python -m sglang.launch_server ... \
        --custom-weight-loader megarl_receiver.load

It needs torch and SGLang, and nothing of megarl.
"""

from .commands import load as load
