"""Defines formats that a trainer and a generation server share; no trainer, no server.

buckets        HF tensors in one flat buffer
handles        memory of this machine as text that another process can map
block_fp8      block-wise FP8 weights as DeepSeek-V3 publishes them
process_group  the group in which a sender broadcasts to servers
routes         the experts that a server's routers chose
"""
