# An image for GPU nodes: the installation of docs/servers.md ("On GPUs"), line by line and in its
# order. We have built no image of it, for want of a builder: take it as a start, not as a product.
#
#     docker build -t registry.example/megarl:1 .
#     ... cluster.container=registry.example/megarl:1 cluster.python=/opt/venv/bin/python
#
# Processes run the code at the path that the launcher runs it from: launch from a checkout at
# /opt/megarl, or have yours in cluster.container_mounts.
#
# Compiling Transformer Engine takes the toolkit of the CUDA that SGLang's torch was built for, so
# the base is one with compilers (devel) of the same major version.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# libnuma is for SGLang's kernels
RUN apt-get update && apt-get install -y --no-install-recommends \
    git libnuma1 python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /opt/megarl
COPY constraints/gpu.txt constraints/gpu.txt
RUN pip install -c constraints/gpu.txt "sglang==0.5.23"
RUN pip install wheel ninja pybind11 cmake nvidia-cudnn-frontend
RUN pip install -c constraints/gpu.txt --no-build-isolation "transformer_engine[pytorch]"

COPY . .
RUN pip install -c constraints/gpu.txt -e ".[wandb]"
