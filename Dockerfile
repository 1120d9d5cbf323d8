# An environment for a machine with NVIDIA GPUs.
#
# UNTESTED: it was written without a GPU machine and without building it. If you try it, please report how it
# went. The host needs NVIDIA's driver and its container toolkit.
#
#     docker build -t hypermlp .
#     docker run --gpus all --rm hypermlp hypermlp info
FROM python:3.12-slim-bookworm

# Triton compiles its launchers with a C compiler; backend "native" needs a C++ compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hypermlp
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY hypermlp hypermlp
COPY recipes recipes

# The newest torch of the package index, which brings CUDA. constraints.txt pins the version that was tested, on CPUs.
RUN pip install --no-cache-dir '.[train,baselines,report]'

WORKDIR /work
CMD ["hypermlp", "info"]
